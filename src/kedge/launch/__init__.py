"""Files that a cluster's scheduler starts a recipe from: sbatch for Slurm, manifests for Kubernetes."""
