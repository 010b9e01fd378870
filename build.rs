//! Bindings to Slurm's SPANK interface, and the plugin's link arguments. Used by `spank-plugin/`.
//!
//! The interface has kept its ABI since Slurm 20.11, so the bindings are shipped
//! (`spank-plugin/src/spank/bindings.rs`): a build needs no Slurm and gives the same plugin everywhere. The
//! feature `bindgen` makes them anew from the installed headers instead. `make bindings` renews the shipped
//! file that way, and a test does it with the headers of every supported release and compares.

fn main() {
    println!("cargo::rerun-if-changed=../build.rs");
    // Slurm reads the plugin's data symbols and never asks for its soname.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,spank_mizzen.so");
    #[cfg(feature = "bindgen")]
    generate();
}

#[cfg(feature = "bindgen")]
fn generate() {
    use std::path::PathBuf;

    println!("cargo::rerun-if-env-changed=SLURM_INCLUDE_DIR");
    let include = match std::env::var_os("SLURM_INCLUDE_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => ["/usr/include", "/usr/local/include", "/opt/slurm/include"]
            .map(PathBuf::from)
            .into_iter()
            .find(|dir| dir.join("slurm/spank.h").exists())
            .unwrap_or_else(|| fail("slurm/spank.h is not installed; set SLURM_INCLUDE_DIR, or build without the feature `bindgen`")),
    };
    let header = include.join("slurm/spank.h");
    if !header.exists() {
        fail(&format!("{} does not exist; SLURM_INCLUDE_DIR must be the parent of slurm/", header.display()));
    }
    let bindings = bindgen::Builder::default()
        .header(header.display().to_string())
        .clang_arg(format!("-I{}", include.display()))
        // Only what the plugin uses: all of it is in every release, with the same types and numbers.
        // Error codes are left out on purpose, their numbers changed after 20.11.
        .allowlist_function("spank_(option_register|get_item|context|setenv|unsetenv|job_control_setenv)")
        .allowlist_function("slurm_(error|info|verbose|debug)")
        .allowlist_type("spank_t|spank_option|spank_context|spank_item")
        .blocklist_type("spank_err|spank_err_t|slurm_err_t")
        .raw_line("pub type spank_err_t = ::std::os::raw::c_uint;")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .generate_comments(false)
        .layout_tests(false)
        .merge_extern_blocks(true)
        .rust_target(bindgen::RustTarget::stable(85, 0).unwrap_or_else(|_| fail("bindgen: rust target")))
        .rust_edition(bindgen::RustEdition::Edition2024)
        .generate()
        .unwrap_or_else(|error| fail(&format!("bindgen: {}: {error}", header.display())));
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default()).join("bindings.rs");
    if let Err(error) = bindings.write_to_file(&out) {
        fail(&format!("{}: {error}", out.display()));
    }
}

#[cfg(feature = "bindgen")]
fn fail(why: &str) -> ! {
    println!("cargo::error={why}");
    std::process::exit(1);
}
