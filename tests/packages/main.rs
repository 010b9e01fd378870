//! The packages as administrators meet them: installed on the machines of real Slurm clusters by apt and rpm, used, upgraded
//! under running steps, removed in any order. `make packages-test` builds the packages and a newer version of each, and runs this.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test fails by panicking

mod apparmor;
mod lifecycle;
mod plugstack;
mod site;
