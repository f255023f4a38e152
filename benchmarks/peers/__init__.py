"""What the PPO benchmarks share: the case, its two sides and the floor under both."""
