"""Stage `reward`: reward models and ensembles."""
