"""The critic-free methods (GRPO and its relatives), one file and one entry point each (`kedge.algorithms`)."""
