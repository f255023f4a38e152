"""What calls cost: tokens, dollars, the ledger of a run, and budgets that several share."""
