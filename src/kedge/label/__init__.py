"""The store of people's labels: a SQLite file, or PostgreSQL for teams. Texts by their hash, items, leases, judgments
that are only ever added, exports that are the same for ever."""
