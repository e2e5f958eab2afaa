//! What does not fit is an error, before evaluation or from it, and never a panic or a wild read.

use super::*;
use crate::mlx::cpu_ops::{Activation, AttentionArgs, KeysValues, MatrixKind, PackedHeads, Rotation};
use crate::mlx::fast::Mask;
use crate::mlx::{Result, async_eval};

fn says(result: Result<impl std::fmt::Debug>, part: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(part), "{error}");
}

#[test]
fn shapes_and_types_are_checked_when_a_node_is_made() {
    let kernels = kernels(1);
    let (x, weight) = (noise(1, &[2, 64]), noise(2, &[32, 64]));
    let kind = MatrixKind::new(None, 32, 64);
    says(kernels.linear(&noise(1, &[2, 63]), kind, &[&weight], None), "64 columns");
    says(kernels.linear(&x, MatrixKind::new(None, 33, 64), &[&weight], None), "[33, 64]");
    says(kernels.linear(&x, kind, &[&weight], Some(&noise(3, &[31]))), "no bias of 32");
    says(kernels.linear(&x, kind, &[&weight, &weight], None), "2 arrays");
    says(kernels.linear(&x, kind, &[&cast(&weight, Dtype::Int32)], None), "types");
    let packed = pack(&weight, AFFINE4);
    let quantized = MatrixKind::new(Some(AFFINE4), 32, 64);
    says(kernels.linear(&x, quantized, &[&packed[0], &packed[1]], None), "2 arrays");
    let half = cast(&packed[2], Dtype::Float16);
    says(kernels.linear(&x, quantized, &[&packed[0], &packed[1], &half], None), "types");
    says(kernels.embedding(&x, kind, &[&weight]), "no rows");
    says(kernels.rms_norm(&x, &noise(1, &[48]), 1e-5), "last axis");
    says(kernels.rms_norm(&x, &noise(1, &[2, 64]), 1e-5), "last axis");
    says(kernels.add_rms_norm(&x, &noise(1, &[1, 64]), &noise(1, &[64]), 1e-5), "not alike");
    says(kernels.layer_norm(&x, None, Some(&noise(1, &[63])), 1e-5), "last axis");
    says(kernels.activate_gated(Activation::Silu, &x, &weight), "not alike");
    let rotation = Rotation::from_base(32, 1e4, 1.0, false).unwrap();
    says(kernels.rope(&x, &rotation, 0), "[B, heads, L, dim]");
    says(kernels.rope_tokens(&noise(1, &[1, 2, 64]), 5, &rotation, 0), "5 heads");
    says(kernels.rope_tokens(&noise(1, &[1, 2, 64]), 4, &rotation, 0), "fewer features");
    says(Rotation::from_base(31, 1e4, 1.0, false), "even");
    says(Rotation::from_base(-2, 1e4, 1.0, false), "negative");
}

#[test]
fn attention_refuses_what_does_not_fit() {
    let kernels = kernels(1);
    let (q, k) = (noise(1, &[1, 4, 3, 32]), noise(2, &[1, 2, 8, 32]));
    let run = |q: &Array, k: &Array, v: &Array, mask: &Mask, sinks: Option<&Array>| {
        let args = AttentionArgs { scale: 1.0, mask, sinks };
        kernels.attention(q, KeysValues::Dense(k, v), &args)
    };
    says(run(&noise(1, &[4, 3, 32]), &k, &k, &Mask::None, None), "[B, heads, L, dim]");
    says(run(&q, &noise(2, &[2, 2, 8, 32]), &k, &Mask::None, None), "batch");
    says(run(&q, &noise(2, &[1, 3, 8, 32]), &k, &Mask::None, None), "batch or heads");
    says(run(&noise(1, &[1, 3, 3, 32]), &k, &k, &Mask::None, None), "multiple");
    says(run(&noise(1, &[1, 4, 9, 32]), &k, &k, &Mask::Causal, None), "too few");
    says(run(&q, &k, &k, &Mask::Array(noise(3, &[3, 9])), None), "broadcast");
    says(run(&q, &k, &k, &Mask::Array(cast(&noise(3, &[3, 8]), Dtype::Int32)), None), "broadcast");
    says(run(&q, &k, &k, &Mask::None, Some(&noise(3, &[2]))), "sinks");
    // Only the kernel compares these.
    let found = run(&noise(1, &[1, 4, 3, 16]), &k, &k, &Mask::None, None).unwrap();
    says(found.eval(), "[attention]");
    let found = run(&q, &k, &noise(3, &[1, 2, 7, 32]), &Mask::None, None).unwrap();
    says(found.eval(), "length of the values");
    let packed = pack(&k, AFFINE4);
    let heads = PackedHeads { weight: &packed[0], scales: &packed[1], biases: &packed[2] };
    let short = rows(&packed[0], 2, 0, 7);
    let wrong = PackedHeads { weight: &short, ..heads };
    let args = AttentionArgs { scale: 1.0, mask: &Mask::None, sinks: None };
    let found = kernels.attention(&q, KeysValues::Packed(wrong, heads, AFFINE4), &args).unwrap();
    says(found.eval(), "differ");
}

/// An id is data: only evaluation can know that it is wrong. The stream goes on.
#[test]
fn an_index_outside_a_table_surfaces_from_evaluation() {
    let kernels = kernels(1);
    let table = noise(1, &[8, 32]);
    let kind = MatrixKind::new(None, 8, 32);
    for ids in [Array::from_slice(&[0u32, 8], &[2]).unwrap(), Array::from_slice(&[-1i32], &[1]).unwrap()] {
        let rows = kernels.embedding(&ids, kind, &[&table]).unwrap();
        let after = rows.add_scalar(1.0).unwrap();
        let started = async_eval([&after]);
        says(started.and_then(|()| after.to_vec::<f32>()), "[embedding] ");
    }
    let stack = noise(1, &[2, 16, 32]);
    let chosen = Array::from_slice(&[2u32], &[1, 1]).unwrap();
    let stacked = MatrixKind::stacked(None, 2, 16, 32);
    let found = kernels.experts(&noise(2, &[1, 32]), &chosen, stacked, &[&stack], None).unwrap();
    says(found.eval(), "expert index 2");
    let fine = kernels.embedding(&Array::from_slice(&[7u32], &[1]).unwrap(), kind, &[&table]).unwrap();
    assert_eq!(bits(&fine), bits(&rows(&table, 0, 7, 8)));
}

#[test]
fn nothing_in_gives_nothing_out() {
    let kernels = kernels(2);
    let x = Array::zeros(&[1, 0, 64], Dtype::Float32).unwrap();
    let kind = MatrixKind::new(None, 32, 64);
    let product = kernels.linear(&x, kind, &[&noise(1, &[32, 64])], None).unwrap();
    assert_eq!((product.shape(), bits(&product).len()), (&[1, 0, 32][..], 0));
    assert_eq!(bits(&kernels.rms_norm(&x, &noise(1, &[64]), 1e-5).unwrap()).len(), 0);
    assert_eq!(bits(&kernels.activate(Activation::Silu, &x).unwrap()).len(), 0);
    let rotation = Rotation::from_base(32, 1e4, 1.0, false).unwrap();
    assert_eq!(kernels.rope_tokens(&x, 2, &rotation, 0).unwrap().eval().map(|()| 0).unwrap(), 0);
    let queries = Array::zeros(&[1, 2, 0, 32], Dtype::Float32).unwrap();
    let keys = noise(1, &[1, 2, 4, 32]);
    let args = AttentionArgs { scale: 1.0, mask: &Mask::None, sinks: None };
    kernels.attention(&queries, KeysValues::Dense(&keys, &keys), &args).unwrap().eval().unwrap();
}
