"""`kedge chat`: talk with a model, or with two side by side."""
