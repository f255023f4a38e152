"""What `kedge check` looks at before a run: data, records, rewards, reward models, the machine."""
