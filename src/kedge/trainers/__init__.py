"""Short loops. They know core and the maths; models, data and runs reach them as roles and functions."""
