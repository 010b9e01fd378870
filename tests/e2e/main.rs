//! The end-to-end tests: mizzen as users and administrators meet it, on real Slurm clusters.
//!
//! They are one program: it links once, and its tests share one pool of threads and one set of prepared images. So no
//! test may change what belongs to the whole process: the environment, the current directory, signals.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test fails by panicking

mod artefacts;
mod bad_input;
mod bad_mounts;
mod bare_clients;
mod broadcast;
mod cache;
mod cdi;
mod cluster;
mod commands;
mod configless;
mod container;
mod contracts;
mod dependencies;
mod documents;
mod early_broadcast;
mod enroot;
mod environment_files;
mod essentials;
mod examples;
mod fabric;
mod failing;
mod file_server;
mod first_steps;
mod gpu;
mod hints;
mod hostile;
mod image_policy;
mod installation;
mod lifetime;
mod many_nodes;
mod mpi;
mod mpirun;
mod named;
mod old_kernels;
mod other_users;
mod own_hostname;
mod pyxis;
mod pyxis_cases;
mod read_through;
mod read_through_calls;
mod read_through_changes;
mod read_through_faults;
mod registry_images;
mod registry_requests;
mod releases;
mod robustness;
mod save;
mod served_by_others;
mod settings;
mod site_copies;
mod site_copies_faults;
mod site_copies_root;
mod site_mounts;
mod slurm_commands;
mod srun;
mod staging;
mod staging_faults;
mod start_profile;
mod step_channel;
mod steps;
mod surroundings;
mod uneven_nodes;
mod unpacking_faults;
mod unstartable;
mod ways_in;
