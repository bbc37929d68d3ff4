"""Everything that wants one GPU: `make gpu`. Parts by value, each resumable; on a CPU, in tiny sizes, they prove that they run."""
