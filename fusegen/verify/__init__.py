"""Verification: every prebuilt kernel on a device against float64 and torch eager, and the stored record of it."""
