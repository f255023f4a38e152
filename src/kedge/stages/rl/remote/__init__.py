"""The roles of an RL run in groups of processes of their own: what the driver has of them, and what a worker holds."""
