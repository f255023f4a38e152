"""The four roles of PPO (actor, critic, reward, reference) and the three ways to hold them: see `hold`."""
