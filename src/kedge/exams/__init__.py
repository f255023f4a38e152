"""Exams: questions with known answers, put to any model, graded item by item.

Everything here is pure: questions and grades. The stage `exam` asks the model; statistics are in `kedge.evaluate`.
"""
