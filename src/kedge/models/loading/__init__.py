"""From a name to a model: aliases, folders, hub ids, GGUF files; and the identity of weights."""
