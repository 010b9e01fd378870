//! Scripts as Singularity and people write them, and as an attacker would.

use super::super::super::testing::Random;
use super::*;
use std::ffi::{OsStr, OsString};

fn job(name: &OsStr) -> Option<OsString> {
    (name == "HOME").then(|| OsString::from("/home/u"))
}

/// The exported variables as `NAME=value`, and the lines that were not understood.
fn parse(text: impl AsRef<[u8]>) -> (Vec<String>, Vec<String>) {
    let mut variables = Variables::new(&job);
    parse_into("f", text.as_ref(), &mut variables).unwrap();
    let (environment, places) = variables.finish();
    let pair = |(name, value): (OsString, OsString)| {
        format!("{}={}", name.to_string_lossy(), value.to_string_lossy())
    };
    (environment.into_iter().map(pair).collect(), places)
}

fn understood(text: &str, expected: &[&str]) {
    let (environment, places) = parse(text);
    assert_eq!(places, [""; 0], "{text}");
    assert_eq!(environment, expected, "{text}");
}

fn lines_skipped(text: &str, expected: &[&str], lines: &[usize]) {
    let (environment, places) = parse(text);
    assert_eq!(environment, expected, "{text}");
    let lines: Vec<String> = lines.iter().map(|line| format!("f:{line}")).collect();
    assert_eq!(places, lines, "{text}");
}

#[test]
fn the_simple_forms() {
    understood("#!/bin/sh\n\nexport A=\"two words\"\n", &["A=two words"]);
    understood("export A='it is $A'\nexport B=plain", &["A=it is $A", "B=plain"]);
    understood("A=value; export A", &["A=value"]);
    understood("A=1 B=2; export A B # both", &["A=1", "B=2"]);
    understood("A=local\nexport B=$A", &["B=local"]);
    understood("A=1 B=\"$A-2\"; export A B", &["A=1", "B=1-2"]);
    understood("export A=1 B=\"$A-2\"", &["A=1", "B=-2"]);
    understood("  export A=  \nexport A", &["A="]);
    understood("export A=a\\ b\\\"c", &["A=a b\"c"]);
    understood("export A=a#b # c\r\nexport B=1\r\n", &["A=a#b", "B=1"]);
    understood("export A=\"one\ntwo\"\nexport B='x'\"y\"z", &["A=one\ntwo", "B=xyz"]);
    understood("export A=one\\\ntwo", &["A=onetwo"]);
    understood("export UNKNOWN", &[]);
    understood("export LATER\nLATER=1", &["LATER=1"]);
}

#[test]
fn docker_images_made_by_singularity() {
    understood(
        "export PATH=\"/opt/conda/bin:/usr/bin\"\nexport LANG=\"${LANG:-\"C.UTF-8\"}\"\n",
        &["PATH=/opt/conda/bin:/usr/bin", "LANG=C.UTF-8"],
    );
    understood(
        "export OPTS=\"${OPTS:-\"say \\\"hi\\\" for \\$5 \\`x\\` \\\\\"}\"",
        &["OPTS=say \"hi\" for $5 `x` \\"],
    );
    understood("export A=first\nexport A=\"${A:-\"second\"}\"", &["A=first"]);
    understood("export HOME=\"${HOME:-\"/root\"}\"", &["HOME=/root"]);
    understood("export A=\"${A:-\"\"}\"", &["A="]);
}

#[test]
fn references() {
    understood("export A=1\nexport B=$A:${A}2:$C:", &["A=1", "B=1:12::"]);
    understood("export A=$HOME/.cache", &["A=/home/u/.cache"]);
    understood("export L=/l${L:+:$L}\nexport L=/m${L:+:$L}", &["L=/m:/l"]);
    understood("A=\nexport B=${A-x}${A:-y}${A+z}${A:+w}${N-n}", &["B=yzn"]);
    understood("export A=\"cost: $ 5$\"", &["A=cost: $ 5$"]);
    understood("export A=${B:-${C:-'d e'}}", &["A=d e"]);
    understood("export A='$HOME'\nexport B=\"\\$HOME\"", &["A=$HOME", "B=$HOME"]);
}

#[test]
fn what_only_a_shell_knows_is_passed_over() {
    for line in [
        "export A=$(hostname)",
        "export A=`hostname`",
        "export A=\"x $(id) y\"",
        "A=1 command",
        "export A=1 && export B=2",
        "export A=${A%x}",
        "export A=${#A}",
        "export A=${A:=x}",
        "export A=~/x",
        "export A=/x:~/y",
        "export A=$1",
        "export A=$$",
        "export A=(1 2)",
        "export A=1 | cat",
        "export A=$'x'",
        "export A=$[1]",
        "export A=${A:-~}",
        "export A=\"${A:-\"\\x\"}\"",
        "export A=$HO\\\nME",
        "export -n A",
        "export \"A=1\"",
        "source /etc/profile",
        "A",
        "1A=2",
    ] {
        lines_skipped(&format!("{line}\nexport Z=1"), &["Z=1"], &[1]);
    }
    lines_skipped("ulimit -s unlimited\nexport A=1\n. /opt/env.sh\n", &["A=1"], &[1, 3]);
    lines_skipped("export A=1\nexit 0\nexport B=2\n", &["A=1"], &[2]);
}

#[test]
fn nothing_in_a_block_counts() {
    let block =
        "if [ -z \"$A\" ]; then\n  export A=1\nelse\n  if true; then export A=2; fi\nfi\nexport B=1\n";
    lines_skipped(block, &["B=1"], &[1]);
    lines_skipped("for i in 1 2; do\nexport A=$i\ndone\nexport B=1", &["B=1"], &[1]);
    lines_skipped("f() {\nexport A=1\n}\nf\nexport B=1", &["B=1"], &[1, 4]);
    lines_skipped("case \"$A\" in\nx) export A=1 ;;\nesac\nexport B=1", &["B=1"], &[1]);
    lines_skipped("if true; then export A=1; fi\nexport B=1", &["B=1"], &[1]);
    lines_skipped("cat <<'EOF' > /x\nexport A=1\nEOF\nexport B=1", &["B=1"], &[1]);
    lines_skipped("echo a \\\nexport A=1\nexport B=1", &["B=1"], &[1]);
    lines_skipped("if true\nexport A=1\n", &[], &[1]);
}

#[test]
fn bytes_that_are_no_text() {
    let mut variables = Variables::new(&job);
    parse_into("f", b"export A=\"\xff\xfe\"\nexport B=a\0b\nexport C=1", &mut variables).unwrap();
    let (environment, places) = variables.finish();
    assert_eq!(std::os::unix::ffi::OsStrExt::as_bytes(&environment[0].1[..]), b"\xff\xfe");
    assert_eq!((environment.len(), places), (2, vec!["f:2".to_owned()]));
}

#[test]
fn bombs_are_cut() {
    let doubling = format!("export A=xxxxxxxx\n{}", "export A=$A$A\n".repeat(1000));
    let (environment, places) = parse(doubling);
    assert!(environment[0].len() <= 128 * 1024 && places.len() == 100);
    let nested = format!("export A={}\nexport B=1", "${A:-".repeat(100_000));
    lines_skipped(&nested, &["B=1"], &[1]);
    let mut variables = Variables::new(&job);
    let many: String = (0..100).map(|n| format!("export B{n}=$A\n")).collect();
    let text = format!("export A={}\n{many}", "x".repeat(60_000));
    assert!(parse_into("f", text.as_bytes(), &mut variables).is_err(), "the sum is bounded too");
}

#[test]
fn a_hostile_megabyte_takes_no_time() {
    let start = std::time::Instant::now();
    for line in [
        "A=\"${B:-\n",
        "A='\nB=$(\n",
        "if x\n",
        "cat <<X\n",
        "A=1 ",
        "A=$A;",
        "\\\n",
        "x\\\n",
        "((((",
        "A=\\",
    ] {
        let text = line.repeat((1 << 20) / line.len());
        let mut variables = Variables::new(&job);
        let _ = parse_into("f", text.as_bytes(), &mut variables);
    }
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn mutations_never_panic() {
    let seed = b"#!/bin/sh\nexport A=\"${A:-\"v\"}\"\nB='x y'; export B\nif [ -n \"$B\" ]; then\nC=1\nfi\n\
        export L=/l${L:+:$L} # note\ncat <<EOF\nx\nEOF\nexport D=a\\ b\n";
    let pieces: &[&[u8]] = &[
        b"\"", b"'", b"${", b"}", b"$(", b"\\", b"\n", b"<<E", b"export ", b"$A", b":-", b"if ", b"\0",
        b"\xff",
    ];
    let mut random = Random::new(0xe9f);
    for _ in 0..6000 {
        let mut text = seed.to_vec();
        random.mutate(&mut text, pieces);
        random.mutate(&mut text, pieces);
        let mut variables = Variables::new(&job);
        parse_into("f", &text, &mut variables).unwrap();
        for (name, value) in variables.finish().0 {
            assert!(Variables::fits(name.as_encoded_bytes(), value.as_encoded_bytes()));
        }
    }
}
