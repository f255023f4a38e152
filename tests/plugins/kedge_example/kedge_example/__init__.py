"""One part of each kind that Kedge can be extended with (docs/plugins.md)."""
