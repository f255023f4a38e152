"""Stage `revise`: answers, criticised and rewritten by the principles of a constitution (SL-CAI, Bai et al. 2022)."""
