"""Public exams: the layouts in which they are published, and how their files are brought here."""
