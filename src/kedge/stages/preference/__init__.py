"""Stage `preference`: DPO and its family, offline and online."""
