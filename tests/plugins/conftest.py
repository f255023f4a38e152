"""The example package is installed by a test, never collected."""

collect_ignore = ["kedge_example"]
