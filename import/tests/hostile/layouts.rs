//! What stands around the layers: manifests, indexes, the archives of docker save.

use super::*;

/// A layout of a manifest with this configuration and these layers.
fn described(directory: &Path, change: impl Fn(&Layout, &mut Value)) {
    let layout = Layout::new(directory);
    let layers = [layer(&[file("a", "a")])];
    let mut manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": layout.put(config(&layers, "amd64").as_bytes(), CONFIG),
        "layers": [layout.put(&layers[0], LAYER)],
    });
    change(&layout, &mut manifest);
    layout.name("x", layout.put(manifest.to_string().as_bytes(), MANIFEST));
}

type Change = Box<dyn Fn(&Layout, &mut Value)>;

#[test]
fn layouts_that_contradict_themselves() {
    let sparse = |layout: &Layout, len: u64| {
        let digest = digest(format!("{len}").as_bytes());
        File::create(layout.blob(&digest)).unwrap().set_len(len).unwrap();
        json!({ "mediaType": CONFIG, "digest": digest, "size": len })
    };
    let other = |layout: &Layout, descriptor: &Value| {
        let path = layout.blob(descriptor["digest"].as_str().unwrap());
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let cases: Vec<(&str, Change, &str)> = vec![
        ("nothing wrong", Box::new(|_, _| ()), ""),
        (
            "a configuration of 1 GB",
            Box::new(move |layout, m| m["config"] = sparse(layout, 1 << 30)),
            "has more than 8388608 bytes",
        ),
        (
            "another layer",
            Box::new(move |layout, m| other(layout, &m["layers"][0])),
            "the content is another, with the digest sha256:",
        ),
        (
            "another configuration",
            Box::new(move |layout, m| other(layout, &m["config"])),
            "the content is another, with the digest sha256:",
        ),
        (
            "a wrong size of the layer",
            Box::new(|_, m| m["layers"][0]["size"] = json!(7)),
            "bytes, and the manifest says 7",
        ),
        (
            "a wrong size of the configuration",
            Box::new(|_, m| m["config"]["size"] = json!(7)),
            "bytes, and the manifest says 7",
        ),
        (
            "a missing layer",
            Box::new(|layout, m| {
                fs::remove_file(layout.blob(m["layers"][0]["digest"].as_str().unwrap())).unwrap()
            }),
            "is not there",
        ),
        (
            "a digest that leads out",
            Box::new(|_, m| m["config"]["digest"] = json!("sha256:../../../../../etc/passwd")),
            "64 hexadecimal digits in lower case",
        ),
        (
            "a digest of md5",
            Box::new(|_, m| m["config"]["digest"] = json!(format!("md5:{}", "a".repeat(32)))),
            "only sha256 and sha512",
        ),
        (
            "10,000 layers",
            Box::new(|_, m| m["layers"] = json!(vec![m["layers"][0].clone(); 10_000])),
            "the image has 10000 layers, more than 1000",
        ),
        (
            "an index, too",
            Box::new(|_, m| m["manifests"] = json!([])),
            "it is a manifest and an index at the same time, which is refused",
        ),
        (
            "called an index",
            Box::new(|_, m| m["mediaType"] = json!(INDEX)),
            "and its content that of a manifest; refused",
        ),
        ("of schema 1", Box::new(|_, m| m["schemaVersion"] = json!(1)), "schema 1, a format of before 2016"),
        (
            "a configuration that is a list",
            Box::new(|layout, m| m["config"] = layout.put(b"[]", CONFIG)),
            "the image's configuration is damaged: ",
        ),
    ];
    for (name, change, words) in cases {
        let (home, scratch) = (bounded(), Scratch::new());
        described(scratch.path(), change);
        let source = format!("oci:{}", scratch.path().display());
        if words.is_empty() {
            home.image(&[&source]);
            continue;
        }
        let outcome = home.import(&["-o", "image.sqsh", &source]);
        assert!(outcome.code == Some(1) && outcome.stderr.contains(words), "{name}: {outcome:?}");
        assert!(home.leftovers().is_empty(), "{name}: {:?}", home.leftovers());
        let layers = fs::read_dir(home.layers()).map_or(0, |entries| entries.count());
        assert_eq!(layers, 0, "{name}: a layer was kept");
    }
}

#[test]
fn indexes_that_have_no_end() {
    let (home, scratch) = (bounded(), Scratch::new());
    let layout = Layout::new(scratch.path());
    let mut entry = layout.image(&[layer(&[file("a", "a")])], "amd64");
    let names = ["none", "one", "two", "three"];
    for name in names {
        layout.name(name, entry.clone());
        entry = layout.index(&[entry]);
    }
    let source = |name: &str| format!("oci:{}:{name}", scratch.path().display());
    for name in &names[..3] {
        assert_eq!(home.tree(&[&source(name)]).len(), 2, "{name}");
    }
    let refused = home.import(&["-fo", "image.sqsh", &source("three")]);
    refused.assert_fails(&["an index in an index in an index, which is refused"]);
    // An index that is too long to be read.
    File::options().write(true).open(scratch.path().join("index.json")).unwrap().set_len(1 << 30).unwrap();
    let refused = home.import(&["-fo", "image.sqsh", &source("none")]);
    refused.assert_fails(&["index.json has more than 4194304 bytes"]);
}

/// An archive of docker save, with what it says of its image.
fn saved(config: &str, layers: &[(&str, &[u8])], names: &[&str]) -> Vec<u8> {
    let mut parts = vec![entry(b"config.json", b'0', config.as_bytes())];
    parts.extend(layers.iter().map(|(name, bytes)| entry(name.as_bytes(), b'0', bytes)));
    let manifest = json!([{ "Config": "config.json", "RepoTags": ["x:1"], "Layers": names }]);
    parts.push(entry(b"manifest.json", b'0', manifest.to_string().as_bytes()));
    end(&parts)
}

#[test]
fn archives_of_docker_that_contradict_themselves() {
    let good = layer(&[file("a", "a")]);
    let description = config(std::slice::from_ref(&good), "amd64");
    let wrong = layer(&[file("a", "b")]);
    let many = vec![good.clone(); 1001];
    let link = |name: &[u8], to: &[u8]| {
        header(name, b'2', 0, |header| header[157..157 + to.len()].copy_from_slice(to))
    };
    // The last entry of a name counts.
    let with_links = end(&[
        saved(&description, &[("l.tar", &good)], &["l.tar"]).split_last_chunk::<1024>().unwrap().0.to_vec(),
        link(b"manifest.json", b"/etc/passwd"),
        link(b"loop/a", b"b"),
        link(b"loop/b", b"a"),
    ]);
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("nothing wrong", saved(&description, &[("l.tar", &good)], &["l.tar"]), ""),
        (
            "another layer",
            saved(&description, &[("l.tar", &wrong)], &["l.tar"]),
            "the content is another, with the digest sha256:",
        ),
        (
            "a layer too many",
            saved(&description, &[("l.tar", &good)], &["l.tar", "l.tar"]),
            "manifest.json has 2 layers, and the configuration 1",
        ),
        ("a missing layer", saved(&description, &[], &["l.tar"]), "l.tar is not there"),
        ("a layer of the machine", saved(&description, &[], &["/etc/passwd"]), "is not there"),
        ("a layer that leads out", saved(&description, &[], &["../../etc/passwd"]), "is not there"),
        (
            "1001 layers",
            saved(&config(&many, "amd64"), &[("l.tar", &good)], &["l.tar"; 1001]),
            "the image has 1001 layers, more than 1000",
        ),
        ("links out of the archive", with_links, "no manifest.json"),
    ];
    for (name, bytes, words) in cases {
        let home = bounded();
        fs::write(home.path("archive"), &bytes).unwrap();
        let stream = [&entry(b"repositories", b'0', b"{}")[..], &bytes].concat();
        for from_file in [true, false] {
            let outcome = match from_file {
                true => home.import(&["-o", "image.sqsh", "docker-archive:archive"]),
                false => home.import_from(&["-o", "image.sqsh", "-"], &stream),
            };
            if words.is_empty() {
                assert_eq!(outcome.code, Some(0), "{name}: {outcome:?}");
                fs::remove_file(home.path("image.sqsh")).unwrap();
            } else {
                assert!(outcome.code == Some(1) && outcome.stderr.contains(words), "{name}: {outcome:?}");
            }
            assert_eq!(home.leftovers(), ["archive"], "{name}");
        }
    }
    // What an image does not need must not take all descriptors of a stream, and takes none of a file.
    let home = bounded();
    let others: Vec<String> = (0..1001).map(|number| format!("{number}.tar")).collect();
    let others: Vec<(&str, &[u8])> = others.iter().map(|name| (name.as_str(), good.as_slice())).collect();
    let archive = saved(&description, &others, &["7.tar"]);
    let start = entry(b"repositories", b'0', b"{}");
    let refused = home.import_from(&["-o", "image.sqsh", "-"], &[&start[..], &archive].concat());
    refused.assert_fails(&["it has more than 1000 layers", "hint: from a file, in place of a stream"]);
    fs::write(home.path("archive"), &archive).unwrap();
    assert_eq!(home.tree(&["docker-archive:archive"]).len(), 2);
    // A configuration that is longer than a stream may keep.
    let home = bounded();
    let huge = bomb(&header(b"config.json", b'0', 1 << 30, |_| ()), 1 << 30, gzip);
    let start = gzip(&entry(b"repositories", b'0', b"{}"));
    let refused = home.import_from(&["-o", "image.sqsh", "-"], &[start, huge].concat());
    refused.assert_fails(&["no manifest.json: not an archive of docker save"]);
    assert!(home.leftovers().is_empty(), "{:?}", home.leftovers());
}
