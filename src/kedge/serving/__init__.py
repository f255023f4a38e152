"""A model behind HTTP: answers in the form of OpenAI's API, or the scores of a reward model as `{kind: http}` reads
them. Requests that wait are computed together; what each gets does not depend on it."""
