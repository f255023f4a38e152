"""What runs on the inner side of the sandbox: with the standard library alone, and without a line of the rest of Kedge.

`server` is started once and forks a process for each program; `namespaces` builds what that process sees of the
machine, `confine` and `seccomp` take its powers away, `program` runs the code.
"""
