"""Commands whose answer is a page: watching runs, the board of models, the studio."""
