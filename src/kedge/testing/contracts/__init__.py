"""Contract tests for plugins: subclass a contract, give it a factory, and pytest checks the promises of that kind."""
