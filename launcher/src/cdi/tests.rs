use super::*;

/// As `nvidia-ctk cdi generate` writes it (1.17, shortened), with devices that every machine has.
const NVIDIA: &str = r#"---
cdiVersion: 0.5.0
containerEdits:
  deviceNodes:
  - path: /dev/nvidia-uvm
    hostPath: /dev/zero
  - path: /dev/nvidiactl
    hostPath: /dev/full
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  hooks:
  - args:
    - nvidia-cdi-hook
    - create-symlinks
    - --link
    - ../libnvidia-allocator.so.1::/usr/lib/x86_64-linux-gnu/gbm/nvidia-drm_gbm.so
    - --link
    - libcuda.so.1::/usr/lib/x86_64-linux-gnu/libcuda.so
    env:
    - NVIDIA_CTK_DEBUG=false
    hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
  - args:
    - nvidia-cdi-hook
    - enable-cuda-compat
    - --host-driver-version=570.133.20
    hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
  - args:
    - nvidia-cdi-hook
    - update-ldcache
    - --folder
    - /usr/lib/x86_64-linux-gnu
    - --folder
    - /usr/lib/x86_64-linux-gnu/vdpau
    hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
  - args:
    - nvidia-cdi-hook
    - disable-device-node-modification
    hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
  mounts:
  - containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.570.133.20
    hostPath: /proc/self/exe
    options:
    - ro
    - nosuid
    - nodev
    - rbind
    - rprivate
  - containerPath: /run/nvidia-persistenced
    hostPath: /proc
    options: [rw, noexec]
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
      hostPath: /dev/null
      type: c
      major: 1
      minor: 3
  name: "0"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia1
      hostPath: /dev/null
    hooks:
    - args: [nvidia-ctk, hook, chmod, --mode, "755", --path, /dev/dri]
      hookName: createContainer
      path: /usr/bin/nvidia-ctk
    env: [WHICH=1]
  name: GPU-1
kind: nvidia.com/gpu
"#;

fn specs(files: &[(&str, usize, &str)]) -> Specs {
    let mut specs = Specs::default();
    for (path, priority, text) in files {
        specs.add(path.into(), *priority, Ok((*text).to_owned()));
    }
    specs
}

fn edits(specs: &Specs, names: &str) -> Result<Edits, Failure> {
    Edits::of(specs, &DeviceName::parse_list(names.as_bytes()).unwrap(), &[])
}

/// A file with one device that has these edits.
fn one(version: &str, edits: &str) -> String {
    format!(
        r#"{{"cdiVersion": "{version}", "kind": "v.com/c", "devices": [{{"name": "d", "containerEdits": {{{edits}}}}}]}}"#
    )
}

fn refused(text: &str) -> String {
    let specs = specs(&[("/etc/cdi/x.json", 0, text)]);
    let failure = edits(&specs, "v.com/c=d").unwrap_err();
    failure.message
}

#[test]
fn what_nvidia_writes_is_understood() {
    let specs = specs(&[("/etc/cdi/nvidia.yaml", 0, NVIDIA)]);
    assert_eq!(specs.broken(), &[]);
    let edits = edits(&specs, "nvidia.com/gpu=GPU-1,nvidia.com/gpu=0,nvidia.com/gpu=0").unwrap();
    let variables: Vec<String> =
        edits.variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
    assert_eq!(variables, ["NVIDIA_VISIBLE_DEVICES=void", "WHICH=1"]);
    let binds: Vec<(String, &str, bool, bool, bool)> = edits
        .binds
        .iter()
        .map(|bind| {
            let MountFlags { read_only, no_exec, .. } = bind.flags;
            (
                bind.target.display().to_string(),
                bind.source.to_str().unwrap(),
                bind.is_directory,
                read_only,
                no_exec,
            )
        })
        .collect();
    let expected = [
        ("/dev/nvidia-uvm", "/dev/zero", false, false, false),
        ("/dev/nvidiactl", "/dev/full", false, false, false),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.570.133.20", "/proc/self/exe", false, true, false),
        ("/run/nvidia-persistenced", "/proc", true, false, true),
        ("/dev/nvidia1", "/dev/null", false, false, false),
        ("/dev/nvidia0", "/dev/null", false, false, false),
    ];
    assert_eq!(binds, expected.map(|(target, rest, a, b, c)| (target.to_owned(), rest, a, b, c)));
    let link = |link: &str, target: &str| (PathBuf::from(link), PathBuf::from(target));
    assert_eq!(
        edits.links,
        [
            link("/usr/lib/x86_64-linux-gnu/gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1"),
            link("/usr/lib/x86_64-linux-gnu/libcuda.so", "libcuda.so.1"),
        ]
    );
    let folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu/vdpau"];
    assert_eq!(edits.library_folders, folders.map(PathBuf::from));
    assert_eq!(edits.cuda_driver.as_deref(), Some("570.133.20"));
    assert_eq!(edits.notes, [""; 0]);
}

#[test]
fn json_is_the_same() {
    let value: serde_json::Value = yaml_serde::from_str(NVIDIA).unwrap();
    let json = format!("{value:#}").replace("  ", "\t");
    let both = ["/etc/cdi/nvidia.json", "/etc/cdi/nvidia.yaml"].map(|path| {
        let text = if path.ends_with("json") { &json } else { NVIDIA };
        let specs = specs(&[(path, 0, text)]);
        let mut edits = edits(&specs, "nvidia.com/gpu=0").unwrap();
        edits.binds.iter_mut().for_each(|bind| bind.why.clear());
        edits
    });
    assert_eq!(both[0], both[1]);
}

#[test]
fn the_directory_with_priority_wins_and_equals_conflict() {
    let first = one("0.5.0", r#""env": ["A=first"]"#);
    let second = one("0.5.0", r#""env": ["A=second"]"#);
    let with_priority = specs(&[("/etc/cdi/a.json", 0, &first), ("/var/run/cdi/a.json", 1, &second)]);
    let edits_of = |specs: &Specs| edits(specs, "v.com/c=d");
    assert_eq!(edits_of(&with_priority).unwrap().variables, [("A".into(), "second".into())]);
    assert_eq!(with_priority.devices("v.com/c").len(), 1);
    let equal = specs(&[("/etc/cdi/a.json", 0, &first), ("/etc/cdi/b.json", 0, &second)]);
    assert_eq!(
        edits_of(&equal).unwrap_err().message,
        "v.com/c=d: /etc/cdi/a.json and /etc/cdi/b.json both describe it"
    );
}

#[test]
fn what_is_missing_is_named() {
    let good = one("0.5.0", r#""env": ["A=1"]"#);
    let known = specs(&[("/etc/cdi/a.json", 0, &good)]);
    let message = |specs: &Specs, name: &str| {
        let failure = edits(specs, name).unwrap_err();
        format!("{} | {}", failure.message, failure.hint.unwrap_or_default())
    };
    assert_eq!(message(&known, "v.com/c=e"), "v.com/c=e: this node has no such device | of v.com/c it has d");
    let other = message(&known, "v.com/x=d");
    assert!(
        other.starts_with("v.com/x=d: this node has no CDI specification for v.com/x | there are v.com/c;")
    );
    let none = message(&specs(&[]), "v.com/c=d");
    assert!(none.contains("| there are none in /etc/cdi and /var/run/cdi; "), "{none}");
    // A broken file is told of only where it may be the one that has the device.
    let broken = specs(&[("/etc/cdi/a.json", 0, &good), ("/etc/cdi/b.json", 0, "{")]);
    assert!(edits(&broken, "v.com/c=d").is_ok());
    let told = message(&broken, "v.com/c=e");
    assert!(
        told.starts_with(
            "v.com/c=e is in no valid CDI specification of this node: /etc/cdi/b.json: did not find expected"
        ),
        "{told}"
    );
}

#[test]
fn what_is_wrong_in_a_file_is_named() {
    let ends = [
        (one("2.0.0", ""), "cdiVersion 2.0.0 is newer than 1.1.0, the newest that mizzen knows"),
        // A field of that version must not hide it.
        (one("2.0.0", r#""new": 1"#), "cdiVersion 2.0.0 is newer than 1.1.0, the newest that mizzen knows"),
        (one("0.9.0", ""), "cdiVersion 0.9.0 is no version of CDI"),
        (one("latest", ""), "cdiVersion \"latest\" is not a version like 1.1.0"),
        (
            one("0.3.0", r#""additionalGids": [4]"#),
            "cdiVersion 0.3.0 does not have additionalGids; CDI has it since 0.7.0",
        ),
        (
            one("1.0.0", r#""netDevices": [{"hostInterfaceName": "a", "name": "b"}]"#),
            "cdiVersion 1.0.0 does not have netDevices; CDI has it since 1.1.0",
        ),
        (one("0.5.0", r#""env": ["=1"]"#), "device \"d\": variable \"=1\" is not NAME=VALUE"),
        (
            one("0.5.0", r#""deviceNodes": [{"path": "dev/x"}]"#),
            "device \"d\": device node: \"dev/x\" is not an absolute path",
        ),
        (one("0.5.0", "").replace("\"d\"", "\"d!\""), "\"d!\" is not the name of a device"),
        (
            one("0.5.0", "").replace("v.com/c", "c"),
            "\"c\" is not a kind of devices like \"vendor.com/class\"",
        ),
        (
            one("0.5.0", "").replace("\"devices\"", "\"hooks\""),
            "unknown field `hooks`, expected one of `cdiVersion`, `kind`, `annotations`, `devices`, `containerEdits` at line 1 column 44",
        ),
    ];
    for (text, end) in ends {
        let prefix = "v.com/c=d is in no valid CDI specification of this node: /etc/cdi/x.json: ";
        assert_eq!(refused(&text).strip_prefix(prefix), Some(end));
    }
    let twice = one("0.5.0", "").replace("]}", r#", {"name": "d", "containerEdits": {}}]}"#);
    assert!(refused(&twice).ends_with("it has two devices \"d\""));
    let unknown = edits(
        &specs(&[("/etc/cdi/x.yaml", 0, "cdiVersion: 0.5.0\nkind: v.com/c\ndevice: []\n")]),
        "v.com/c=d",
    );
    let message = unknown.unwrap_err().message;
    assert!(
        message.contains("x.yaml: unknown field `device`, expected one of")
            && message.ends_with("at line 3 column 1"),
        "{message}"
    );
}

#[test]
fn what_does_not_fit_the_node_is_named() {
    let cases = [
        (
            r#""deviceNodes": [{"path": "/dev/no-such"}]"#,
            "/dev/no-such of the node: No such file or directory",
        ),
        (
            r#""deviceNodes": [{"path": "/dev/null", "type": "b"}]"#,
            "/dev/null of the node: is not a device of the type that is written there",
        ),
        (
            r#""deviceNodes": [{"path": "/proc"}]"#,
            "/proc of the node: is not a device of the type that is written there",
        ),
        (
            r#""deviceNodes": [{"path": "/dev/null", "major": 195, "minor": 3}]"#,
            "/dev/null of the node: is device 1:3, not 195:3 as is written there",
        ),
        (
            r#""mounts": [{"hostPath": "/no/lib.so", "containerPath": "/x"}]"#,
            "/no/lib.so of the node: No such file or directory",
        ),
        (
            r#""mounts": [{"hostPath": "/proc", "containerPath": "/x", "options": ["ro", "idmap"]}]"#,
            "mount on /x: mizzen cannot mount with the option \"idmap\"",
        ),
        (
            r#""mounts": [{"hostPath": "/proc", "containerPath": "/x", "type": "ext4"}]"#,
            "mount on /x: mizzen cannot mount file systems of type \"ext4\"",
        ),
    ];
    for (edits, message) in cases {
        assert_eq!(refused(&one("0.5.0", edits)), format!("/etc/cdi/x.json: {message}"));
    }
}

#[test]
fn hooks_are_known_or_refused_or_left_out() {
    let hook = |path: &str, args: &str| {
        one(
            "0.5.0",
            &format!(r#""hooks": [{{"hookName": "createContainer", "path": "{path}", "args": [{args}]}}]"#),
        )
    };
    let ctk = "/usr/bin/nvidia-ctk";
    let cases = [
        (
            hook("/usr/bin/vendor", r#""vendor", "create-symlinks""#),
            "hook /usr/bin/vendor: mizzen does not know what it does, and runs no programs for a specification",
        ),
        (
            hook(ctk, r#""nvidia-ctk", "hook", "dance""#),
            "hook /usr/bin/nvidia-ctk: mizzen does not know the hook \"dance\"",
        ),
        (
            hook(ctk, r#""nvidia-ctk", "hook", "create-symlinks", "--link", "a::b""#),
            "hook /usr/bin/nvidia-ctk: create-symlinks: \"a::b\" is not TARGET::/LINK",
        ),
        (
            hook(ctk, r#""nvidia-ctk", "hook", "create-symlinks", "--link", "a::/b/../c""#),
            "hook /usr/bin/nvidia-ctk: create-symlinks: \"a::/b/../c\" is not TARGET::/LINK",
        ),
        (
            hook(ctk, r#""nvidia-ctk", "hook", "update-ldcache", "--folder""#),
            "hook /usr/bin/nvidia-ctk: update-ldcache: its arguments are not --NAME VALUE",
        ),
    ];
    for (text, message) in &cases {
        assert_eq!(refused(text), format!("/etc/cdi/x.json: {message}"));
    }
    for (text, name) in [(&cases[0].0, "/usr/bin/vendor"), (&cases[1].0, "dance")] {
        let specs = specs(&[("/etc/cdi/x.json", 0, text)]);
        let wanted = DeviceName::parse_list(b"v.com/c=d").unwrap();
        assert!(Edits::of(&specs, &wanted, &[name.to_owned()]).is_ok());
    }
    let wrapped =
        hook("/opt/nvidia-cdi-hook.real", r#""x", "--quiet", "create-symlinks", "--link=a::/b,c::/d""#);
    let edits = edits(&specs(&[("/etc/cdi/x.json", 0, &wrapped)]), "v.com/c=d").unwrap();
    assert_eq!(edits.links.len(), 2);
}

#[test]
fn what_mizzen_cannot_do_is_told() {
    let text = one(
        "1.1.0",
        r#""intelRdt": {"closID": "x", "schemata": ["L3:0=f"]}, "additionalGids": [0, 44],
        "netDevices": [{"hostInterfaceName": "ib0", "name": "ib0"}, {"hostInterfaceName": "ib1", "name": "net1"}]"#,
    );
    let edits = edits(&specs(&[("/etc/cdi/x.json", 0, &text)]), "v.com/c=d").unwrap();
    assert_eq!(edits.groups, [44]);
    assert_eq!(
        edits.notes,
        [
            "/etc/cdi/x.json: intelRdt is left out: only root can divide the processor's cache",
            "/etc/cdi/x.json: network interface ib1 is not renamed to net1",
        ]
    );
}

#[test]
fn what_is_nested_too_deeply_is_refused() {
    let spec = |value: &str| {
        format!(
            "cdiVersion: 0.6.0\nkind: vendor.com/card\ndevices: [{{name: a, containerEdits: {{env: [{value}]}}}}]\n"
        )
    };
    let refused = |text: &str| spec::Spec::parse(text).err().map(|failure| failure.message);
    let too_deep = Some("it is nested more than 64 levels deep".to_owned());
    for harmless in ["\"A=[[{\"", "'A=[[{'", "\"A=\\\"[\"", "A=it's", "A=b # ["] {
        let quoted = spec(harmless).replace(']', "\n]");
        assert_eq!(refused(&quoted), None, "{harmless}");
        let many = [harmless; 100].join("\n, ");
        assert_eq!(
            refused(&spec(&many).replace(']', "\n]")).filter(|_| !harmless.contains('#')),
            None,
            "{harmless}"
        );
    }
    for deep in ["[".repeat(100), "{a: ".repeat(100), "[\"]\", ".repeat(100), "['}', ".repeat(100)] {
        assert_eq!(refused(&spec(&deep)), too_deep, "{deep}");
    }
    for alias in ["*a", " *a", "b, *a"] {
        let message = refused(&spec(alias)).unwrap();
        assert!(message.starts_with("it repeats a part of itself by an alias"), "{alias}: {message}");
    }
    assert_eq!(refused(&spec("A=*, \"*b\", A=a:*")).filter(|message| message.contains("alias")), None);
    let (open, close) = ("[".repeat(60), "]".repeat(60));
    assert_ne!(refused(&spec(&format!("{open}{close}"))), too_deep);
}
