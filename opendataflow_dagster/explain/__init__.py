"""`odf why`: what blocks a claim, the five answers; and `odf doctor`'s checks of the tables."""
