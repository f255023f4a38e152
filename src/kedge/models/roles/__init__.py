"""The four roles of PPO (actor, critic, reward, reference) and three ways to build them: see `build`."""
