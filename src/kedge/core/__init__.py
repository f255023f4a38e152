"""The shared vocabulary: records, losses and their one mean, protocols, settings, plugins, seeds, errors.

Nothing is imported here, so that light users (the command line, recipe checks) never pay for torch.
"""
