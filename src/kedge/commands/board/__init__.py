"""What `kedge board` gathers: folders in; models, comparisons, verdicts and lost items as plain records out."""
