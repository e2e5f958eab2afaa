//! safetensors files whose header lies, and the comparison with the reference reader.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use mlx_bun::checkpoint::safetensors::{MAX_HEADER_BYTES, SafetensorsFile, parse_header};
use mlx_bun::checkpoint::safetensors_writer::{WriteError, write_safetensors};
use mlx_bun::checkpoint::{CheckpointError, ElementType};
use proptest::prelude::*;

use super::support::{Folder, assert_message, safetensors_bytes};

fn open(bytes: &[u8]) -> CheckpointError {
    let folder = Folder::new();
    let path = folder.write("lying.safetensors", bytes);
    SafetensorsFile::open(&path).unwrap_err()
}

fn entry(dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

#[track_caller]
fn assert_refused(header: &str, data: usize, parts: &[&str]) {
    let error = open(&safetensors_bytes(header, data));
    assert_message(&error, &[&["lying.safetensors: "], parts].concat());
}

#[test]
fn a_file_cut_in_the_header_length_is_refused() {
    assert_message(&open(b""), &["0 bytes are too short"]);
    assert_message(&open(&[1, 0, 0]), &["3 bytes are too short", "truncated"]);
}

#[test]
fn a_file_cut_in_the_header_is_refused() {
    let whole = safetensors_bytes(&format!("{{\"w\":{}}}", entry("F32", "[1]", 0, 4)), 4);
    assert_message(&open(&whole[..20]), &["the file has only 20", "truncated"]);
}

#[test]
fn a_file_cut_in_the_data_is_refused() {
    assert_refused(
        &format!("{{\"w\":{}}}", entry("F32", "[2]", 0, 8)),
        7,
        &["`w`", "8 of 7 bytes", "truncated"],
    );
}

#[test]
fn every_cut_of_a_good_file_is_refused() {
    let whole = safetensors_bytes(&format!("{{\"w\":{}}}", entry("F32", "[1]", 0, 4)), 4);
    assert!(parse_header(&whole).is_ok());
    for length in 0..whole.len() {
        assert!(parse_header(&whole[..length]).is_err(), "cut to {length}");
    }
}

#[test]
fn a_header_length_of_2_to_the_60_is_refused() {
    for length in [1u64 << 60, u64::MAX, MAX_HEADER_BYTES + 1] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(b"{}");
        assert_message(&open(&bytes), &[&length.to_string(), "limit of 100000000"]);
    }
}

#[test]
fn huge_metadata_is_refused_unread() {
    let folder = Folder::new();
    let path = folder.join("huge.safetensors");
    let mut file = File::create(&path).unwrap();
    file.write_all(&(MAX_HEADER_BYTES + 1).to_le_bytes()).unwrap();
    file.set_len(8 + MAX_HEADER_BYTES + 1).unwrap();
    assert_message(&SafetensorsFile::open(&path).unwrap_err(), &["huge.safetensors", "over the limit"]);
}

#[test]
fn large_metadata_within_the_limit_is_read() {
    let header = format!(r#"{{"__metadata__":{{"a":"{}"}}}}"#, "x".repeat(3_000_000));
    let read = parse_header(&safetensors_bytes(&header, 0)).unwrap();
    assert_eq!(read.metadata["a"].len(), 3_000_000);
}

#[test]
fn offsets_past_the_end_are_refused() {
    let end = 4 + (1u64 << 40);
    assert_refused(
        &format!("{{\"w\":{}}}", entry("F32", "[1]", 1 << 40, end)),
        4,
        &["`w`", &end.to_string()],
    );
}

#[test]
fn a_tensor_that_ends_before_it_begins_is_refused() {
    assert_refused(
        &format!("{{\"w\":{}}}", entry("F32", "[1]", 8, 4)),
        8,
        &["`w`", "begins at byte 8", "ends at 4"],
    );
}

#[test]
fn a_range_that_does_not_fit_the_shape_is_refused() {
    let header = format!("{{\"w\":{}}}", entry("F32", "[2,3]", 0, 20));
    assert_refused(&header, 20, &["`w`", "F32", "[2, 3]", "24 bytes", "20"]);
}

#[test]
fn sizes_of_2_to_the_60_are_refused() {
    for shape in [
        "[1152921504606846976]",
        "[1152921504606846976,1152921504606846976]",
        "[18446744073709551615]",
        "[4294967296,4294967296]",
    ] {
        let header = format!("{{\"w\":{}}}", entry("U64", shape, 0, 8));
        let error = open(&safetensors_bytes(&header, 8));
        assert_message(&error, &["`w`"]);
    }
    let header = format!("{{\"w\":{}}}", entry("F32", "[1152921504606846976,16]", 0, 0));
    assert_refused(&header, 0, &["`w`", "[1152921504606846976, 16]", "overflows"]);
}

#[test]
fn numbers_beyond_64_bits_are_refused() {
    for number in ["18446744073709551616", "1e400", "-1", "1.0"] {
        assert_refused(&format!("{{\"w\":{}}}", entry("U8", &format!("[{number}]"), 0, 1)), 1, &["`w`"]);
    }
}

#[test]
fn overlapping_tensors_are_refused() {
    let header = format!("{{\"a\":{},\"b\":{}}}", entry("F32", "[2]", 0, 8), entry("F32", "[2]", 4, 12));
    assert_refused(&header, 12, &["`a` and `b` overlap"]);
    let header = format!("{{\"a\":{0},\"b\":{0}}}", entry("F32", "[2]", 0, 8));
    assert_refused(&header, 8, &["overlap"]);
}

#[test]
fn holes_are_refused() {
    let header = format!("{{\"a\":{},\"b\":{}}}", entry("F32", "[1]", 0, 4), entry("F32", "[1]", 6, 10));
    assert_refused(&header, 10, &["2 bytes before tensor `b`"]);
    assert_refused(&format!("{{\"a\":{}}}", entry("F32", "[1]", 0, 4)), 9, &["5 bytes at the end"]);
    assert_refused("{}", 1, &["1 bytes at the end"]);
}

#[test]
fn duplicate_names_are_refused() {
    let header = format!("{{\"w\":{},\"w\":{}}}", entry("F32", "[1]", 0, 4), entry("F32", "[1]", 4, 8));
    assert_refused(&header, 8, &["`w`", "twice"]);
    // The second name is the first one spelt with an escape.
    let header = format!("{{\"w\":{},\"\\u0077\":{}}}", entry("F32", "[1]", 0, 4), entry("F32", "[1]", 4, 8));
    assert_refused(&header, 8, &["`w`", "twice"]);
    assert_refused(r#"{"__metadata__":{"a":"1","a":"2"}}"#, 0, &["`a`", "twice"]);
    assert_refused(r#"{"__metadata__":{},"__metadata__":{}}"#, 0, &["`__metadata__` is listed twice"]);
}

#[test]
fn invalid_utf8_is_refused() {
    let mut bytes = safetensors_bytes(r#"{"__metadata__":{"a":"x"}}"#, 0);
    let at = bytes.len() - 4;
    bytes[at] = 0xff;
    assert_message(&open(&bytes), &["not valid UTF-8", "byte 22"]);
}

#[test]
fn a_header_that_is_not_an_object_is_refused() {
    for header in ["", "[]", "null", "{", "{}x", r#"{"w":1}"#, r#"{"w":null}"#, r#"{"__metadata__":{"a":1}}"#]
    {
        assert_refused(header, 0, &["the header is not valid"]);
    }
}

#[test]
fn fp8_and_unknown_dtypes_are_named() {
    for dtype in ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F64", "C64", "f32", ""] {
        let expected = format!("dtype {dtype} of tensor `w` is not supported");
        assert_refused(&format!("{{\"w\":{}}}", entry(dtype, "[1]", 0, 1)), 1, &[&expected]);
    }
}

#[test]
fn a_hostile_name_cannot_break_the_message() {
    let name = format!("a\\n\\u001b[31m{}", "x".repeat(100_000));
    let error = open(&safetensors_bytes(&format!("{{\"{name}\":{}}}", entry("F8_E4M3", "[1]", 0, 1)), 1));
    assert_message(&error, &["a\\n\\u{1b}[31m", "…"]);
    assert!(error.to_string().len() < 1000);
}

#[test]
fn directories_and_missing_files_are_named() {
    let folder = Folder::new();
    let error = SafetensorsFile::open(folder.path()).unwrap_err();
    assert_message(&error, &["is not a regular file"]);
    assert_message(&SafetensorsFile::open(&folder.join("no.safetensors")).unwrap_err(), &["no.safetensors"]);
}

#[test]
fn nothing_of_the_data_is_read_on_opening() {
    let size = 1u64 << 34;
    let header = format!("{{\"w\":{}}}", entry("F32", &format!("[{}]", size / 4), 0, size));
    let folder = Folder::new();
    let path = folder.write("sparse.safetensors", safetensors_bytes(&header, 0));
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() + size).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    let (name, tensor) = file.tensors().next().unwrap();
    assert_eq!((name, tensor.bytes().len() as u64), ("w", size));
    assert_eq!(tensor.bytes().last(), Some(&0));
}

#[test]
fn an_unwritable_path_is_one_line() {
    let folder = Folder::new();
    let file = folder.write("file", "x");
    for path in [folder.join("no/such/a.safetensors"), file.join("a.safetensors"), folder.path().to_owned()] {
        let tensors = [("w", ElementType::U8, [1].as_slice(), [1])];
        let error = write_safetensors(&path, tensors, &BTreeMap::new()).unwrap_err();
        assert!(matches!(error, WriteError::File(_)));
        assert_message(&error, &["cannot write", &path.to_string_lossy()]);
    }
}

/// What the reference reader says about the same bytes: ranges in the data and metadata.
type Summary = (BTreeMap<String, (String, Vec<usize>, usize, usize)>, BTreeMap<String, String>);

fn reference(bytes: &[u8]) -> Option<Summary> {
    let (header, metadata) = safetensors::SafeTensors::read_metadata(bytes).ok()?;
    let tensors = metadata.tensors().into_iter().map(|(name, info)| {
        let (begin, end) = info.data_offsets;
        let start = 8 + header;
        (name, (info.dtype.to_string(), info.shape.clone(), start + begin, start + end))
    });
    Some((tensors.collect(), metadata.metadata().clone().unwrap_or_default().into_iter().collect()))
}

fn ours(bytes: &[u8]) -> Option<Summary> {
    let header = parse_header(bytes).ok()?;
    let tensors = header.tensors.into_iter().map(|tensor| {
        let place = (tensor.dtype.to_string(), tensor.shape, tensor.range.start, tensor.range.end);
        (tensor.name, place)
    });
    Some((tensors.collect(), header.metadata))
}

/// Parses bytes and checks what must hold whatever they are. Shared by all the random tests.
fn check_any(bytes: &[u8]) {
    if let Some(summary) = ours(bytes) {
        assert_eq!(
            reference(bytes),
            Some(summary),
            "we accept what the reference refuses or reads otherwise"
        );
    }
}

const GOOD_HEADER: &str = r#"{"__metadata__":{"format":"mlx"},"a.weight":{"dtype":"U32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},"c":{"dtype":"U8","shape":[0],"data_offsets":[26,26]}}"#;

fn element_type() -> impl Strategy<Value = ElementType> {
    prop::sample::select(ElementType::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check_any(&bytes);
    }

    #[test]
    fn random_headers_never_panic(header in ".{0,200}", data in 0usize..64) {
        check_any(&safetensors_bytes(&header, data));
    }

    #[test]
    fn random_entries_agree_with_the_reference(
        entries in prop::collection::vec((element_type(), prop::collection::vec(0u64..4, 0..3), 0u64..3, 0u64..3), 0..4),
        data in 0usize..80,
    ) {
        let mut begin = 0;
        let entries: Vec<_> = entries.iter().enumerate().map(|(at, (dtype, shape, gap, slack))| {
            let size = shape.iter().product::<u64>() * dtype.size() as u64;
            let (first, last) = (begin + gap / 2, begin + size + slack / 2);
            begin = last;
            format!("\"t{at}\":{}", entry(&dtype.to_string(), &format!("{shape:?}"), first, last))
        }).collect();
        let header = format!("{{{}}}", entries.join(","));
        for data in [data, begin as usize] {
            let bytes = safetensors_bytes(&header, data);
            prop_assert_eq!(ours(&bytes), reference(&bytes));
        }
    }

    #[test]
    fn mutations_of_a_good_header_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = safetensors_bytes(GOOD_HEADER, 26);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        check_any(&bytes);
        check_any(&bytes[..cut.index(bytes.len())]);
    }

    #[test]
    fn written_files_read_back(
        tensors in prop::collection::btree_map(".{0,12}", (element_type(), prop::collection::vec(0usize..5, 0..4), any::<u8>()), 0..8),
        metadata in prop::collection::btree_map(".{0,8}", ".{0,8}", 0..4),
    ) {
        let folder = Folder::new();
        let path = folder.join("a.safetensors");
        let bytes: BTreeMap<_, _> = tensors
            .iter()
            .map(|(name, (dtype, shape, byte))| (name, vec![*byte; dtype.bytes_of(shape).unwrap()]))
            .collect();
        let entries = tensors
            .iter()
            .map(|(name, (dtype, shape, _))| (name.as_str(), *dtype, shape.as_slice(), &bytes[name]));
        write_safetensors(&path, entries, &metadata).unwrap();
        prop_assert!(reference(&std::fs::read(&path).unwrap()).is_some());

        let file = SafetensorsFile::open(&path).unwrap();
        prop_assert_eq!(file.metadata(), &metadata);
        let read: BTreeMap<_, _> = file.tensors().collect();
        prop_assert_eq!(read.len(), tensors.len());
        for (name, (dtype, shape, _)) in &tensors {
            let tensor = &read[name.as_str()];
            prop_assert_eq!((tensor.dtype, &tensor.shape), (*dtype, shape));
            prop_assert_eq!(tensor.bytes(), bytes[name].as_slice());
        }
    }
}

/// Runs the fuzz target's entry point for two seconds on mutated headers.
#[test]
fn fuzz_smoke() {
    const PIECES: [&str; 10] = [
        "{",
        "}",
        "[",
        "]",
        "\"",
        "18446744073709551615",
        "-1",
        "\"dtype\":",
        "\\ud800",
        "\"__metadata__\":",
    ];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let good = safetensors_bytes(GOOD_HEADER, 26);
    let end = Instant::now() + Duration::from_secs(2);
    let mut accepted = 0;
    while Instant::now() < end {
        let mut bytes = good.clone();
        for _ in 0..random(4) {
            let at = 8 + random(bytes.len() - 8);
            match random(3) {
                0 => bytes[at] = random(256) as u8,
                1 => drop(bytes.splice(at..at, PIECES[random(PIECES.len())].bytes())),
                _ => drop(bytes.drain(at..(at + random(9)).min(bytes.len()))),
            }
        }
        if random(2) == 0 {
            let header = bytes.len().saturating_sub(8 + 26) as u64;
            bytes[..8].copy_from_slice(&header.to_le_bytes());
        }
        check_any(&bytes);
        accepted += usize::from(parse_header(&bytes).is_ok());
    }
    assert!(accepted > 0, "mutations that change nothing pass");
}
