use std::collections::BTreeMap;

use super::*;
use crate::elf::Library;
use crate::host_libraries::discover::FoundSet;
use crate::host_libraries::rules::Set;
use crate::image::DirectoryTree;
use crate::image::testing::Scratch;

/// A library by its needs, `file:version`, and what it offers.
fn library(soname: &str, requires: &[&str], offers: &[&str]) -> Library {
    let requires: Vec<Requirement> = requires
        .iter()
        .map(|pair| {
            let (library, version) = pair.split_once(':').unwrap();
            Requirement { library: library.to_owned(), version: version.to_owned() }
        })
        .collect();
    let mut needed: Vec<String> = requires.iter().map(|requirement| requirement.library.clone()).collect();
    needed.dedup();
    let offers = offers.iter().map(|offer| (*offer).to_owned()).collect();
    Library { soname: Some(soname.to_owned()), needed, requires, offers }
}

fn candidate(name: &str, file: &str, library: Option<Library>) -> Candidate {
    Candidate { name: name.to_owned(), file: file.into(), origin: "here".to_owned(), library }
}

fn found(candidates: Vec<Candidate>, version: Option<&str>, set: &str) -> Found {
    let set: Set = toml::from_str(&format!("name = \"x\"\n{set}")).unwrap();
    let mut libraries: BTreeMap<String, Vec<Candidate>> = BTreeMap::new();
    for candidate in candidates {
        libraries.entry(candidate.name.clone()).or_default().push(candidate);
    }
    let sets =
        vec![FoundSet { set, libraries, missing: Vec::new(), programs: Vec::new(), files: Vec::new() }];
    Found { version: version.map(str::to_owned), gpus: Vec::new(), devices: Vec::new(), sets }
}

/// What is decided for each file, in an image with these libraries, on a node that has no others.
fn decided(found: &Found, image: &[(&str, &Library)]) -> BTreeMap<String, Option<Incompatibility>> {
    let nothing = Scratch::new();
    let tree = DirectoryTree::open(nothing.path()).unwrap();
    let image = ImageLibraries::for_tests(&tree, image);
    let decisions = decide(found, &[], &Node::at(nothing.path()), &image);
    decisions.into_iter().map(|decision| (decision.candidate.file_name(), decision.incompatibility)).collect()
}

fn old_glibc() -> Library {
    library("libc.so.6", &[], &["GLIBC_2.2.5", "GLIBC_2.9", "GLIBC_2.31", "GLIBC_PRIVATE"])
}

#[test]
fn a_library_that_needs_a_newer_glibc_is_left_out() {
    let good = library("libgood.so.1", &["libc.so.6:GLIBC_2.31"], &[]);
    let needs =
        ["libc.so.6:GLIBC_2.9", "libc.so.6:GLIBC_2.33", "libc.so.6:GLIBC_2.36", "libc.so.6:GLIBC_2.34"];
    let bad = library("libbad.so.1", &needs, &[]);
    let relr = library("librelr.so.1", &["libc.so.6:GLIBC_ABI_DT_RELR"], &[]);
    let found = found(
        vec![
            candidate("libgood.so.1", "/lib/libgood.so.1.1", Some(good)),
            candidate("libbad.so.1", "/lib/libbad.so.1", Some(bad)),
            candidate("librelr.so.1", "/lib/librelr.so.1", Some(relr)),
            candidate("libodd.so.1", "/lib/libodd.so.1", None),
        ],
        None,
        "",
    );
    let decided = decided(&found, &[("libc.so.6", &old_glibc())]);
    assert_eq!(decided["libgood.so.1.1"], None);
    assert_eq!(decided["libodd.so.1"], Some(Incompatibility::Foreign));
    let incompatibility = decided["libbad.so.1"].as_ref().unwrap();
    assert_eq!(incompatibility.text(), "it needs GLIBC_2.36, and the image's libc.so.6 has up to GLIBC_2.31");
    assert!(incompatibility.hint().is_some());
    let incompatibility = decided["librelr.so.1"].as_ref().unwrap();
    assert_eq!(
        incompatibility.text(),
        "it needs GLIBC_ABI_DT_RELR, which the image's libc.so.6 does not have"
    );
}

#[test]
fn what_is_needed_comes_from_the_node_or_the_image() {
    let glibc = old_glibc();
    let provider = library("libprovider.so", &["libcore.so.1:CORE_PRIVATE_34"], &[]);
    let core = library("libcore.so.1", &["libc.so.6:GLIBC_2.2.5"], &["CORE_1", "CORE_PRIVATE_34"]);
    let images = library("libcore.so.1", &[], &["CORE_1", "CORE_PRIVATE_33"]);
    let image: &[(&str, &Library)] = &[("libc.so.6", &glibc), ("libcore.so.1", &images)];
    let provider = candidate("libprovider.so", "/lib/libprovider.so", Some(provider));
    let core_file = candidate("libcore.so.1", "/lib/libcore.so.1.5", Some(core));
    let both = found(vec![provider.clone(), core_file.clone()], None, "");
    assert!(decided(&both, image).values().all(Option::is_none), "the node's own is there");
    let alone = found(vec![provider.clone()], None, "");
    let incompatibility = decided(&alone, image)["libprovider.so"].clone().unwrap();
    assert_eq!(
        incompatibility.text(),
        "it needs CORE_PRIVATE_34, and the image's libcore.so.1 has up to CORE_PRIVATE_33"
    );
    let incompatibility = decided(&alone, &[("libc.so.6", &glibc)])["libprovider.so"].clone();
    assert_eq!(incompatibility, Some(Incompatibility::Lacks("libcore.so.1".to_owned())));
    // One that is left out takes those along that need it.
    let mut newer = core_file;
    newer.library.as_mut().unwrap().requires[0].version = "GLIBC_2.99".to_owned();
    let decided_without = decided(&found(vec![provider, newer], None, ""), &[("libc.so.6", &glibc)]);
    assert_eq!(decided_without["libprovider.so"], Some(Incompatibility::Follows("libcore.so.1".to_owned())));
}

#[test]
fn a_matched_set_comes_as_a_whole_or_not_at_all() {
    let glibc = old_glibc();
    let new = library("liba.so.1", &["libc.so.6:GLIBC_2.36"], &[]);
    let old = library("libb.so.1", &["libc.so.6:GLIBC_2.9"], &[]);
    let files = vec![
        candidate("liba.so.1", "/liba.so.1", Some(new)),
        candidate("libb.so.1", "/libb.so.1", Some(old)),
    ];
    let image: &[(&str, &Library)] = &[("libc.so.6", &glibc)];
    assert_eq!(decided(&found(files.clone(), None, ""), image)["libb.so.1"], None);
    let matched = decided(&found(files.clone(), None, "matched = true"), image);
    assert_eq!(matched["libb.so.1"], Some(Incompatibility::Unmatched("liba.so.1".to_owned())));
    let optional = decided(&found(files, None, "matched = true\noptional = [\"liba.*\"]"), image);
    assert_eq!(optional["libb.so.1"], None);
}

#[test]
fn the_kernels_driver_chooses_among_versions() {
    let any = library("libcuda.so.1", &[], &[]);
    let files = vec![
        candidate("libcuda.so.1", "/old/libcuda.so.525.1", Some(any.clone())),
        candidate("libcuda.so.1", "/other/libcuda.so.535.2", None),
        candidate("libcuda.so.1", "/new/libcuda.so.535.2", Some(any.clone())),
        candidate("libegl.so.1", "/new/libegl.so.1.1.11", Some(any)),
    ];
    let right = decided(&found(files.clone(), Some("535.2"), ""), &[]);
    assert_eq!(
        right,
        BTreeMap::from([("libcuda.so.535.2".to_owned(), None), ("libegl.so.1.1.11".to_owned(), None)])
    );
    let wrong = decided(&found(files, Some("550.1"), ""), &[]);
    assert_eq!(
        wrong["libcuda.so.525.1"].as_ref().unwrap().text(),
        "its version is 525.1, and the kernel's driver has 550.1"
    );
}

#[test]
fn a_library_that_cannot_take_the_place_of_the_images_is_left_out() {
    let glibc = old_glibc();
    let verbs = library("libibverbs.so.1", &[], &["IBVERBS_1.0", "IBVERBS_1.14", "IBVERBS_PRIVATE_44"]);
    let provider = library("libmlx5-rdmav44.so", &["libibverbs.so.1:IBVERBS_PRIVATE_44"], &[]);
    let node = || {
        found(
            vec![
                candidate("libibverbs.so.1", "/lib/libibverbs.so.1.14", Some(verbs.clone())),
                candidate("libmlx5-rdmav44.so", "/lib/libmlx5-rdmav44.so", Some(provider.clone())),
            ],
            None,
            "matched = true\nlibraries = [\"libibverbs.so.1\"]\noptional = [\"libmlx5.so.1\", \"/lib/lib*-rdmav*.so\"]",
        )
    };
    let texts = |image: &[(&str, &Library)]| -> Vec<String> {
        let decided = decided(&node(), image);
        decided
            .into_values()
            .map(|incompatibility| {
                incompatibility.map_or(String::new(), |incompatibility| incompatibility.text())
            })
            .collect()
    };
    // Older, with other private versions that nobody needs beside the library's own providers.
    let older = library("libibverbs.so.1", &[], &["IBVERBS_1.0", "IBVERBS_PRIVATE_33"]);
    assert_eq!(texts(&[("libc.so.6", &glibc), ("libibverbs.so.1", &older)]), ["", ""]);
    // Newer than the node's.
    let newer = library("libibverbs.so.1", &[], &["IBVERBS_1.0", "IBVERBS_1.15"]);
    assert_eq!(
        texts(&[("libc.so.6", &glibc), ("libibverbs.so.1", &newer)]),
        [
            "the image's own has IBVERBS_1.15, and it has IBVERBS_1.14",
            "it fits only together with libibverbs.so.1.14, which is left out",
        ]
    );
    // Another library of the image, which the node lacks, knows the old one by its private version.
    let direct = library("libmlx5.so.1", &["libibverbs.so.1:IBVERBS_PRIVATE_33"], &[]);
    let image: &[(&str, &Library)] =
        &[("libc.so.6", &glibc), ("libibverbs.so.1", &older), ("libmlx5.so.1", &direct)];
    assert_eq!(
        texts(image)[0],
        "the image's libmlx5.so.1 needs IBVERBS_PRIVATE_33, and it has IBVERBS_PRIVATE_44"
    );
}
