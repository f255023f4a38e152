"""The gate: rules over exams, evaluations and badcases, and a sealed verdict on whether a model may go out.

Everything here is pure or reads files; no model is loaded. The stage `gate` and the commands replay and decide.
"""
