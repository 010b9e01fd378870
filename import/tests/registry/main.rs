//! The client of registries against a scripted one: what a real registry does not do on demand. Asserted is what the servers
//! saw, above all which request had which Authorization, and what the user reads.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod auth;
mod blobs;
mod logins;
mod manifests;
mod messages;
mod mirrors;
mod networks;
mod redirects;
mod server;
mod support;
