"""Checks of this machine, and the search for a way in which its ranks can communicate."""
