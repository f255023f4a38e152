"""What the stages that sample share: prompts, rewards, rounds of answers, and the run around iterations."""
