"""Sequences split over ranks: the cut, and the exchanges that attention over it needs."""
