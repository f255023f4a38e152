"""Stage `best_of_n`: rejection sampling and BOND."""
