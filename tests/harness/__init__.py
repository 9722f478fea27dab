"""What runs the tests: marks and the count of what ran (`marks`), how mpirun is called (`launch`), the side
of pytest that starts it (`outside`, `child`), the side that runs on each rank (`inside`, `agreement`,
`watchdog`), and the communicator that tests get (`polling`). Nothing here knows mpipar, and nothing in
mpipar knows this."""
