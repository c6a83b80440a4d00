"""From skeletons and checkpoints to compiled programs over weights that live on the devices."""
