"""Choose compiled blocks, attention kernels and TF32 at the start of a stage."""
