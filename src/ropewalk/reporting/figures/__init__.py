"""Figures by subject: functions that make a specification of plain results; ``reporting.drawing`` draws it."""
