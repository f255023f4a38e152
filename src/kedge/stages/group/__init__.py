"""Stage `group`: RL without a critic."""
