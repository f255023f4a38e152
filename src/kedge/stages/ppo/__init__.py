"""Stage `ppo`: PPO with four roles."""
