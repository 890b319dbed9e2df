"""One model run by several processes of this machine: a driver (`session`), its ranks (`worker`), and how they meet."""
