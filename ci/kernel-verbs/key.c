// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
/* Keys: invalidation, and what a key does not give access to. */
#include <linux/sizes.h>

#include "kernel-verbs.h"

/* A WRITE of a few bytes through a key that gives no access to them: they stay as they are. */
static void no_write(struct pair *p, struct segments *segments, u64 addr, u32 length, u32 key)
{
	struct buffer *from = make_buffer(PAGE_SIZE);

	memset(from->data, 0xee, PAGE_SIZE);
	run(&p->a, make_rdma(&p->a, IB_WR_RDMA_WRITE, from, length, addr, key), IB_WC_REM_ACCESS_ERR);
	CHECK(zero_segments(segments));
	expect_state(&p->a, IB_QPS_ERR);
	expect_state(&p->b, IB_QPS_ERR);
}

TEST(inv_local)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&p, segments, ALL_ACCESS);
	struct request *inv = make_inv(&p.b, mr->rkey);

	post(&p.b, inv);
	expect_ok(&inv->op, IB_WC_LOCAL_INV);
	no_write(&p, segments, mr->iova, 64, mr->rkey);
}

/* Local users lose it, too. */
TEST(inv_local_lkey)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = make_mr(p.a.pd, IB_MR_TYPE_MEM_REG, 2);
	struct request *send = make_request(&p.a, IB_WR_SEND);

	registered(&p.a, mr, segments, ALL_ACCESS);
	run(&p.a, make_inv(&p.a, mr->lkey), IB_WC_SUCCESS);
	receive_into(&p.b, NULL, 0);
	with_sge(send, mr->iova, 64, mr->lkey);
	run(&p.a, send, IB_WC_LOC_PROT_ERR);
}

/* With FENCE, after a READ that uses it. */
TEST(inv_local_fenced)
{
	struct pair p = PAIR();
	struct segments *from = make_pages(32), *into = make_pages(32);
	struct ib_mr *source = remote_region(&p, from, ALL_ACCESS);
	struct ib_mr *sink = make_mr(p.a.pd, IB_MR_TYPE_MEM_REG, 32);
	int i;

	for (i = 0; i < 16; i++) {
		struct request *read, *inv;

		fill_segments(from, i);
		registered(&p.a, sink, into, IB_ACCESS_LOCAL_WRITE);
		read = make_request(&p.a, IB_WR_RDMA_READ);
		with_sge(read, sink->iova, sink->length, sink->lkey);
		to_remote(read, source->iova, source->rkey);
		inv = make_inv(&p.a, sink->lkey);
		inv->wr.send_flags |= IB_SEND_FENCE;
		read->wr.next = &inv->wr;
		post(&p.a, read);
		expect_ok(&read->op, IB_WC_RDMA_READ);
		expect_ok(&inv->op, IB_WC_LOCAL_INV);
		CHECK(filled_segments(into, i));
	}
}

/*
 * Without FENCE, it may come before an earlier READ has ended; that then fails, and never goes on
 * after it.
 */
TEST(inv_local_not_fenced)
{
	struct pair p = PAIR();
	struct segments *from = make_pages(32), *into = make_pages(32);
	struct ib_mr *source = remote_region(&p, from, ALL_ACCESS);
	struct ib_mr *sink = make_mr(p.a.pd, IB_MR_TYPE_MEM_REG, 32);
	struct request *read, *inv;

	fill_segments(from, 1);
	registered(&p.a, sink, into, IB_ACCESS_LOCAL_WRITE);
	read = make_request(&p.a, IB_WR_RDMA_READ);
	with_sge(read, sink->iova, sink->length, sink->lkey);
	to_remote(read, source->iova, source->rkey);
	inv = make_inv(&p.a, sink->lkey);
	read->wr.next = &inv->wr;
	post(&p.a, read);
	CHECK(completes(&read->op, 10000));
	CHECK(completes(&inv->op, 10000));
	if (read->op.wc.status == IB_WC_SUCCESS) {
		CHECK(filled_segments(into, 1));
		EQ(inv->op.wc.status, IB_WC_SUCCESS);
	} else {
		EQ(read->op.wc.status, IB_WC_LOC_PROT_ERR);
	}
}

/* An invalidation that follows WRITEs from the region lets them end first. */
TEST(inv_local_after_writes)
{
	struct pair p = PAIR();
	struct segments *from = make_pages(16), *to = make_pages(16);
	struct ib_mr *sink = remote_region(&p, to, ALL_ACCESS);
	struct ib_mr *source = make_mr(p.a.pd, IB_MR_TYPE_MEM_REG, 16);
	struct request *writes[4], *inv;
	int i;

	registered(&p.a, source, from, 0);
	fill_segments(from, 4);
	for (i = 0; i < 4; i++) {
		writes[i] = make_request(&p.a, IB_WR_RDMA_WRITE);
		with_sge(writes[i], source->iova, source->length, source->lkey);
		to_remote(writes[i], sink->iova, sink->rkey);
		post(&p.a, writes[i]);
	}
	inv = make_inv(&p.a, source->lkey);
	post(&p.a, inv);
	for (i = 0; i < 4; i++)
		expect_ok(&writes[i]->op, IB_WC_RDMA_WRITE);
	expect_ok(&inv->op, IB_WC_LOCAL_INV);
	CHECK(filled_segments(to, 4));
}

static void bad_inv(struct pair *p, u32 key)
{
	struct request *inv = make_inv(&p->b, key);

	post(&p->b, inv);
	CHECK(completes(&inv->op, 10000));
	/* A local operation error, or, as InfiniBand also has it, one of bind or of access. */
	CHECK(inv->op.wc.status == IB_WC_LOC_QP_OP_ERR || inv->op.wc.status == IB_WC_MW_BIND_ERR ||
	      inv->op.wc.status == IB_WC_LOC_ACCESS_ERR);
	expect_state(&p->b, IB_QPS_ERR);
}

TEST(inv_unknown_key)
{
	struct pair p = PAIR();

	need_fast_registration();
	bad_inv(&p, 0x77777777);
}

/* The low eight bits count. */
TEST(inv_stale_key)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&p, segments, ALL_ACCESS);

	bad_inv(&p, ib_inc_rkey(mr->rkey));
}

TEST(inv_of_other_pd)
{
	struct pair p = PAIR(), q = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&q, segments, ALL_ACCESS);

	bad_inv(&p, mr->rkey);
	/* It is as it was. */
	run(&q.b, make_inv(&q.b, mr->rkey), IB_WC_SUCCESS);
}

/* The local DMA key, which no work request takes away. */
TEST(inv_dma_key)
{
	struct pair p = PAIR(), q;
	struct options options = { .srq_pd = p.b.pd };
	struct buffer *from = make_buffer(64);
	struct request *send;

	need_fast_registration();
	bad_inv(&p, p.b.pd->local_dma_lkey);
	q = connected(&options);
	receive_into(&q.a, NULL, 0);
	send = make_request(&q.b, IB_WR_SEND);
	with_buffer(&q.b, send, from, 0, 0);
	run(&q.b, send, IB_WC_SUCCESS);
}

/* Remote invalidation. */

TEST(inv_remote)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&p, segments, ALL_ACCESS);
	struct buffer *from = make_buffer(64), *to = make_buffer(64);
	u32 key = mr->rkey;
	int i;

	for (i = 0; i < 4; i++) {
		struct receive *receive = receive_into(&p.b, to, 64);
		struct request *request = make_request(&p.a, IB_WR_SEND_WITH_INV);

		fill(from->data, 64, i);
		with_buffer(&p.a, request, from, 0, 64);
		request->wr.ex.invalidate_rkey = key;
		post(&p.a, request);
		expect_ok(&receive->op, IB_WC_RECV);
		CHECK(receive->op.wc.wc_flags & IB_WC_WITH_INVALIDATE);
		EQ(receive->op.wc.wc_flags & IB_WC_WITH_IMM, 0);
		EQ(receive->op.wc.ex.invalidate_rkey, key);
		CHECK(filled(to->data, 64, i));
		expect_ok(&request->op, IB_WC_SEND);
		/* It is free, and can be registered again. */
		registered(&p.b, mr, segments, ALL_ACCESS);
		key = mr->rkey;
	}
	run(&p.b, make_inv(&p.b, key), IB_WC_SUCCESS);
	no_write(&p, segments, mr->iova, 64, key);
}

static void bad_remote_inv(struct pair *p, u32 key)
{
	struct receive *receive = receive_into(&p->b, NULL, 0);
	struct request *request = make_request(&p->a, IB_WR_SEND_WITH_INV);

	request->wr.ex.invalidate_rkey = key;
	run(&p->a, request, IB_WC_REM_ACCESS_ERR);
	CHECK(completes(&receive->op, 10000));
	CHECK(receive->op.wc.status != IB_WC_SUCCESS);
	expect_state(&p->b, IB_QPS_ERR);
}

TEST(inv_remote_unknown_key)
{
	struct pair p = PAIR();

	need_fast_registration();
	bad_remote_inv(&p, 0x77777777);
}

TEST(inv_remote_stale_key)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&p, segments, ALL_ACCESS);

	bad_remote_inv(&p, ib_inc_rkey(mr->rkey));
}

TEST(inv_remote_of_other_pd)
{
	struct pair p = PAIR(), q = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&q, segments, ALL_ACCESS);

	bad_remote_inv(&p, mr->rkey);
}

/* A READ that invalidates the region it reads into. */
TEST(read_with_inv)
{
	struct pair p = PAIR();
	struct segments *from = make_pages(8), *into = make_pages(8);
	struct ib_mr *source = remote_region(&p, from, ALL_ACCESS);
	struct ib_mr *sink = make_mr(p.a.pd, IB_MR_TYPE_MEM_REG, 8);
	struct request *read, *send;
	int i;

	for (i = 0; i < 4; i++) {
		fill_segments(from, i);
		registered(&p.a, sink, into, IB_ACCESS_LOCAL_WRITE);
		read = make_request(&p.a, IB_WR_RDMA_READ_WITH_INV);
		with_sge(read, sink->iova, sink->length, sink->lkey);
		to_remote(read, source->iova, source->rkey);
		read->wr.ex.invalidate_rkey = sink->lkey;
		post(&p.a, read);
		expect_ok(&read->op, IB_WC_RDMA_READ);
		CHECK(filled_segments(into, i));
	}
	receive_into(&p.b, NULL, 0);
	send = make_request(&p.a, IB_WR_SEND);
	with_sge(send, sink->iova, 0, sink->lkey);
	with_sge(send, sink->iova, 64, sink->lkey);
	run(&p.a, send, IB_WC_LOC_PROT_ERR);
}

/* What a key does not give. */

TEST(key_stale)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&p, segments, ALL_ACCESS);

	no_write(&p, segments, mr->iova, 64, (mr->rkey & ~0xffu) | ((mr->rkey - 1) & 0xff));
}

/* The key before the last binding. */
TEST(key_of_last_binding)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&p, segments, ALL_ACCESS);
	u32 before = mr->rkey;

	run(&p.b, make_inv(&p.b, mr->rkey), IB_WC_SUCCESS);
	registered(&p.b, mr, segments, ALL_ACCESS);
	EQ(mr->rkey, ib_inc_rkey(before));
	no_write(&p, segments, mr->iova, 64, before);
}

/* The low eight bits are the user's: all values, and around. */
TEST(key_all_values)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(1);
	struct ib_mr *mr = make_mr(p.b.pd, IB_MR_TYPE_MEM_REG, 1);
	struct buffer *from = make_buffer(8);
	u32 index = mr->rkey >> 8, i;

	for (i = 0; i < 260; i++) {
		struct request *reg;

		map(mr, segments);
		reg = make_reg(&p.b, mr, ALL_ACCESS);
		EQ(mr->rkey >> 8, index);
		EQ(mr->rkey, mr->lkey);
		run(&p.b, reg, IB_WC_SUCCESS);
		if (i % 64 == 0)
			run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, from, 8, mr->iova, mr->rkey), IB_WC_SUCCESS);
		run(&p.b, make_inv(&p.b, mr->rkey), IB_WC_SUCCESS);
	}
}

/* Free from its allocation until it is registered. */
TEST(key_before_registration)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = make_mr(p.b.pd, IB_MR_TYPE_MEM_REG, 2);

	map(mr, segments);
	no_write(&p, segments, mr->iova, 64, mr->rkey);
}

TEST(key_of_other_pd)
{
	struct pair p = PAIR(), q = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&q, segments, ALL_ACCESS);

	no_write(&p, segments, mr->iova, 64, mr->rkey);
}

TEST(key_of_other_pd_local)
{
	struct pair p = PAIR(), q = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&q, segments, ALL_ACCESS);
	struct request *send = make_request(&p.a, IB_WR_SEND);

	receive_into(&p.b, NULL, 0);
	with_sge(send, mr->iova, 64, mr->lkey);
	run(&p.a, send, IB_WC_LOC_PROT_ERR);
}

TEST(key_beyond_end)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&p, segments, ALL_ACCESS);

	no_write(&p, segments, mr->iova + 2 * PAGE_SIZE - 63, 64, mr->rkey);
}

TEST(key_before_start)
{
	static const struct segment segment = { 100, 1000 };
	struct pair p = PAIR();
	struct segments *segments = make_segments(&segment, 1);
	struct ib_mr *mr = remote_region(&p, segments, ALL_ACCESS);

	no_write(&p, segments, mr->iova - 1, 64, mr->rkey);
}

TEST(key_wrapping_range)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&p, segments, ALL_ACCESS);

	no_write(&p, segments, ~0ull - 10, 64, mr->rkey);
}

TEST(key_beyond_end_local)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = make_mr(p.a.pd, IB_MR_TYPE_MEM_REG, 2);
	struct request *send = make_request(&p.a, IB_WR_SEND);

	registered(&p.a, mr, segments, ALL_ACCESS);
	receive_into(&p.b, NULL, 0);
	with_sge(send, mr->iova + PAGE_SIZE, PAGE_SIZE + 1, mr->lkey);
	run(&p.a, send, IB_WC_LOC_PROT_ERR);
}

TEST(key_without_remote_write)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&p, segments, IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_READ);
	struct buffer *into = make_buffer(64);

	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_READ, into, 64, mr->iova, mr->rkey), IB_WC_SUCCESS);
	no_write(&p, segments, mr->iova, 64, mr->rkey);
}

TEST(key_without_remote_read)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&p, segments, IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE);
	struct buffer *into = make_buffer(64);

	fill_segments(segments, 1);
	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_READ, into, 64, mr->iova, mr->rkey), IB_WC_REM_ACCESS_ERR);
	CHECK(all_zero(into->data, 64));
}

TEST(key_without_remote_atomic)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = remote_region(&p, segments,
					 IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE | IB_ACCESS_REMOTE_READ);
	struct buffer *into = make_buffer(8);
	struct request *request = make_rdma(&p.a, IB_WR_ATOMIC_FETCH_AND_ADD, into, 8, mr->iova, mr->rkey);

	if (device->attrs.atomic_cap == IB_ATOMIC_NONE)
		skip("the device has no atomic operations");
	request->atomic.compare_add = 1;
	run(&p.a, request, IB_WC_REM_ACCESS_ERR);
	CHECK(zero_segments(segments));
}

/* A receive into a region that is not for writing. */
TEST(key_without_local_write)
{
	struct pair p = PAIR();
	struct segments *segments = make_pages(2);
	struct ib_mr *mr = make_mr(p.b.pd, IB_MR_TYPE_MEM_REG, 2);
	struct receive *receive = make_receive(p.b.recv_cq);
	struct request *send = make_request(&p.a, IB_WR_SEND);
	struct buffer *from = make_buffer(64);

	registered(&p.b, mr, segments, IB_ACCESS_REMOTE_READ);
	receive_sge(receive, mr->iova, 64, mr->lkey);
	post_receive(&p.b, receive);
	memset(from->data, 0xee, 64);
	with_buffer(&p.a, send, from, 0, 64);
	run(&p.a, send, IB_WC_REM_OP_ERR);
	expect(&receive->op, IB_WC_LOC_PROT_ERR);
	CHECK(zero_segments(segments));
}

/* A READ into a region that is not for writing. */
TEST(key_read_without_local_write)
{
	struct pair p = PAIR();
	struct segments *from = make_pages(1), *into = make_pages(1);
	struct ib_mr *source = remote_region(&p, from, ALL_ACCESS);
	struct ib_mr *sink = make_mr(p.a.pd, IB_MR_TYPE_MEM_REG, 1);
	struct request *read = make_request(&p.a, IB_WR_RDMA_READ);

	fill_segments(from, 1);
	registered(&p.a, sink, into, IB_ACCESS_REMOTE_READ);
	with_sge(read, sink->iova, 64, sink->lkey);
	to_remote(read, source->iova, source->rkey);
	run(&p.a, read, IB_WC_LOC_PROT_ERR);
	CHECK(zero_segments(into));
}

const struct test key_tests[] = {
	ENTRY(inv_local),
	ENTRY(inv_local_lkey),
	ENTRY(inv_local_fenced),
	ENTRY(inv_local_not_fenced),
	ENTRY(inv_local_after_writes),
	ENTRY(inv_unknown_key),
	ENTRY(inv_stale_key),
	ENTRY(inv_of_other_pd),
	ENTRY(inv_dma_key),
	ENTRY(inv_remote),
	ENTRY(inv_remote_unknown_key),
	ENTRY(inv_remote_stale_key),
	ENTRY(inv_remote_of_other_pd),
	ENTRY(read_with_inv),
	ENTRY(key_stale),
	ENTRY(key_of_last_binding),
	ENTRY(key_all_values),
	ENTRY(key_before_registration),
	ENTRY(key_of_other_pd),
	ENTRY(key_of_other_pd_local),
	ENTRY(key_beyond_end),
	ENTRY(key_before_start),
	ENTRY(key_wrapping_range),
	ENTRY(key_beyond_end_local),
	ENTRY(key_without_remote_write),
	ENTRY(key_without_remote_read),
	ENTRY(key_without_remote_atomic),
	ENTRY(key_without_local_write),
	ENTRY(key_read_without_local_write),
	{},
};
