"""What `kedge export` does: a model of Kedge in the form that another program reads, compared with its source."""
