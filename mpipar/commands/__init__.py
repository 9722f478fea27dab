"""What stands behind `python -m mpipar.<name>`: arguments, printing and files.

The modules of that name in the package itself only put the guard around `main` here, so that a failing import on one
rank ends the job too. Nothing below imports from here.
"""
