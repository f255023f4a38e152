"""What a team needs beside the queue: who may begin, who is paused, review, statistics of people, live chats."""
