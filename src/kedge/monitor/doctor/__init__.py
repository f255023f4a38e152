"""A diagnosis of a run: healthy or not, what happened when, the likeliest cause, and what to change in the recipe."""

from kedge.monitor.doctor.diagnosis import Area, Cause, Change, Diagnosis, History, Moment
from kedge.monitor.doctor.examination import diagnose

__all__ = ["Area", "Cause", "Change", "Diagnosis", "History", "Moment", "diagnose"]
