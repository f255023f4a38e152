"""Instructions that a rule can check: the 25 kinds of IFEval, and the language of a text."""
