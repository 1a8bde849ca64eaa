// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Completion queues: resizing, overflow, moderation, extended queues with all fields and time
 * stamps, channels, threads.
 */
#include "verbs-test.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <time.h>

TEST(cq_bad_parameters)
{
	struct ibv_comp_channel *channel = MAKE(ibv_create_comp_channel(ctx));
	struct ibv_cq_init_attr_ex attr = { .cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct pair p = PAIR(.type = IBV_QPT_RC);

	MAKE_FAILS(EINVAL, ibv_create_cq(ctx, 0, NULL, NULL, 0));
	MAKE_FAILS(EINVAL, ibv_create_cq(ctx, dev.orig_attr.max_cqe + 1, NULL, NULL, 0));
	MAKE_FAILS(EINVAL, ibv_create_cq(ctx, 16, NULL, NULL, ctx->num_comp_vectors));
	MAKE_FAILS(EINVAL, ibv_create_cq(ctx, 16, NULL, NULL, -1));
	attr.wc_flags = 1ull << 40;
	CHECK(!ibv_create_cq_ex(ctx, &attr));
	attr = (struct ibv_cq_init_attr_ex){ .cqe = 16, .comp_mask = 1 << 20 };
	CHECK(!ibv_create_cq_ex(ctx, &attr));
	attr = (struct ibv_cq_init_attr_ex){ .cqe = 16, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS, .flags = 1u << 30 };
	CHECK(!ibv_create_cq_ex(ctx, &attr));
	/* Used by queue pairs, or using a channel. */
	FAILS(EBUSY, ibv_destroy_cq(p.cq[0]));
	struct ibv_cq *cq = MAKE(ibv_create_cq(ctx, 16, NULL, channel, 0));
	CHECK(cq->cqe >= 16);
	FAILS(EBUSY, ibv_destroy_comp_channel(channel));
	OK(ibv_destroy_cq(cq));
	OK(ibv_destroy_comp_channel(channel));
}

/* The largest that there is. */
TEST(cq_max_size)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, dev.orig_attr.max_cqe, NULL, NULL, 0);

	if (!cq)
		EQ(errno, ENOMEM);
	else
		OK(ibv_destroy_cq(cq));
}

/* Entries that were not polled are there after resizing, in their order. */
TEST(cq_resize_with_entries)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .cqe = 16, .send_wr = 256);
	uint64_t posted = 0, polled = 0;

	for (; posted < 12; posted++)
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = posted, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	for (; polled < 5; polled++)
		expect_ok(p.cq[0], polled, RDMA_WRITE);
	OK(ibv_resize_cq(p.cq[0], 100));
	CHECK(p.cq[0]->cqe >= 100);
	for (; posted < polled + 100; posted++)
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = posted, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	for (; polled < posted - 10; polled++)
		expect_ok(p.cq[0], polled, RDMA_WRITE);
	/* Smaller, as small as what is in it. */
	FAILS(EINVAL, ibv_resize_cq(p.cq[0], 0));
	FAILS(EINVAL, ibv_resize_cq(p.cq[0], dev.orig_attr.max_cqe + 1));
	sleep_ms(50);
	FAILS(EINVAL, ibv_resize_cq(p.cq[0], 4));
	OK(ibv_resize_cq(p.cq[0], 16));
	for (; polled < posted; polled++)
		expect_ok(p.cq[0], polled, RDMA_WRITE);
	expect_none(p.cq[0]);
	no_event();
}

/* Resized all the time while completions come, armed now and then. */
LONG_TEST(cq_resize_under_load, 120)
{
	struct ibv_comp_channel *channel = MAKE(ibv_create_comp_channel(ctx));
	struct pair p = PAIR(.type = IBV_QPT_RC, .cqe = 64, .send_wr = 64, .channel = channel);
	uint64_t posted = 0, polled = 0;
	unsigned int resized = 0;

	while (polled < 6000) {
		struct ibv_wc wc[8];
		int n;

		while (posted < polled + 32 && posted < 6000) {
			POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = posted, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
			posted++;
		}
		if (polled % 16 < 8) {
			OK(ibv_resize_cq(p.cq[0], resized++ & 1 ? 64 : 200));
		} else if (polled % 512 < 16) {
			OK(ibv_req_notify_cq(p.cq[0], 0));
			OK(ibv_resize_cq(p.cq[0], resized++ & 1 ? 64 : 200));
			/* The arming is not lost: there is an event, or a completion that came before. */
			n = ibv_poll_cq(p.cq[0], 1, wc);
			CHECK(n > 0 || channel_event(channel, p.cq[0], TIMEOUT_MS));
			if (n > 0)
				EQ(wc[0].wr_id, polled++);
			while (channel_event(channel, p.cq[0], 0))
				;
		}
		n = ibv_poll_cq(p.cq[0], 8, wc);
		CHECK(n >= 0);
		for (int i = 0; i < n; i++) {
			EQ(wc[i].status, IBV_WC_SUCCESS);
			EQ(wc[i].wr_id, polled++);
		}
	}
	CHECK(resized > 100);
	no_event();
}

/* More completions than there is room for: an event, and the queue pairs are in error. */
TEST(cq_overflow)
{
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_cq *small = make_cq(4), *other = make_cq(64);
	struct pair_with with = { .type = IBV_QPT_RC, .send_wr = 256 };
	struct ibv_qp *qp = make_qp(pd, small, &with), *peer = make_qp(pd, other, &with);
	struct region mr = region(pd, 4096, ALL);
	struct conn to = conn(peer->qp_num);
	int room = small->cqe;

	CHECK(room >= 4 && room < 200);
	connect_qp(qp, &to);
	to = conn(qp->qp_num);
	connect_qp(peer, &to);
	for (int i = 0; i < room + 8; i++)
		POST(qp, .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &mr, .length = 8, .to = &mr, .to_offset = 64);
	CHECK(wait_event(CQ_ERR).element.cq == small);
	wait_state(qp, IBV_QPS_ERR);
	EQ(state_of(peer), IBV_QPS_RTS);
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_cq(small));
	/* Others are unharmed. */
	qp = make_qp(pd, other, &with);
	set_state(peer, IBV_QPS_RESET);
	to = conn(peer->qp_num);
	connect_qp(qp, &to);
	to = conn(qp->qp_num);
	connect_qp(peer, &to);
	POST(qp, .opcode = IBV_WR_RDMA_WRITE, .id = 99, .from = &mr, .length = 8, .to = &mr, .to_offset = 64);
	expect_ok(other, 99, RDMA_WRITE);
}

/* As full as can be is not too full. */
TEST(cq_exactly_full)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .cqe = 32, .send_wr = 256);
	uint64_t posted = 0, polled = 0;

	for (int lap = 0; lap < 5; lap++) {
		for (int i = 0; i < p.cq[0]->cqe; i++)
			POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = posted++, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
		sleep_ms(100);
		while (polled < posted)
			expect_ok(p.cq[0], polled++, RDMA_WRITE);
	}
	no_event();
}

/* Moderation delays events: fewer completions than its count, for its period; and loses none. */
TEST(cq_moderation)
{
	enum { MANY = 64, COUNT = 8, PERIOD_US = 20000 };
	struct ibv_comp_channel *channel = MAKE(ibv_create_comp_channel(ctx));
	struct pair p = PAIR(.type = IBV_QPT_RC, .channel = channel, .send_wr = MANY);
	struct ibv_modify_cq_attr attr = { .attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = { .cq_count = COUNT, .cq_period = PERIOD_US } };
	uint64_t id = 0, polled = 0, start, quickest = UINT64_MAX;
	int events = 0;

	CHECK(dev.cq_mod_caps.max_cq_count >= COUNT && dev.cq_mod_caps.max_cq_period >= PERIOD_US);
	OK(ibv_modify_cq(p.cq[0], &attr));
	/* Fewer than the count: when the period is over. */
	for (; id < 20; id++) {
		OK(ibv_req_notify_cq(p.cq[0], 0));
		start = now_ns();
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = id, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
		CHECK(channel_event(channel, p.cq[0], TIMEOUT_MS));
		/* The host's clock measures, and ours may be a little off it. */
		CHECK(now_ns() - start >= PERIOD_US * 900ull);
		expect_ok(p.cq[0], polled++, RDMA_WRITE);
	}
	/* More than the count: one event for several. */
	attr.moderate.cq_period = dev.cq_mod_caps.max_cq_period;
	OK(ibv_modify_cq(p.cq[0], &attr));
	OK(ibv_req_notify_cq(p.cq[0], 0));
	for (; id < 20 + MANY; id++)
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = id, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	while (polled < id) {
		struct ibv_wc wc;

		CHECK(channel_event(channel, p.cq[0], TIMEOUT_MS));
		events++;
		OK(ibv_req_notify_cq(p.cq[0], 0));
		while (ibv_poll_cq(p.cq[0], 1, &wc) == 1) {
			CHECK(wc.status == IBV_WC_SUCCESS);
			EQ(wc.wr_id, polled++);
		}
	}
	CHECK(events >= 1 && events <= MANY / 2);
	/* Off again: at once, if the machine has the time for it. */
	attr.moderate.cq_count = attr.moderate.cq_period = 0;
	OK(ibv_modify_cq(p.cq[0], &attr));
	while (channel_event(channel, p.cq[0], QUIET))
		;
	for (int i = 0; i < 20; i++, id++) {
		OK(ibv_req_notify_cq(p.cq[0], 0));
		start = now_ns();
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = id, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
		CHECK(channel_event(channel, p.cq[0], TIMEOUT_MS));
		if (now_ns() - start < quickest)
			quickest = now_ns() - start;
		expect_ok(p.cq[0], polled++, RDMA_WRITE);
	}
	CHECK(quickest < PERIOD_US * 1000ull);
	/* As far as it goes, and what there is not. */
	attr.moderate.cq_count = dev.cq_mod_caps.max_cq_count;
	attr.moderate.cq_period = dev.cq_mod_caps.max_cq_period;
	OK(ibv_modify_cq(p.cq[0], &attr));
	attr.attr_mask = 1 << 20;
	CHECK(ibv_modify_cq(p.cq[0], &attr) != 0);
}

/*
 * Events of several queues on one channel, each with its context; unacknowledged events hold the
 * queue.
 */
TEST(cq_channel_of_many)
{
	struct ibv_comp_channel *channel = MAKE(ibv_create_comp_channel(ctx));
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct pair_with with = { .type = IBV_QPT_RC };
	struct region mr = region(pd, 4096, ALL);
	struct ibv_cq *cq[4], *found;
	struct ibv_qp *qp[4];
	void *context;

	for (int i = 0; i < 4; i++) {
		cq[i] = MAKE(ibv_create_cq(ctx, 16, &cq[i], channel, i % ctx->num_comp_vectors));
		qp[i] = make_qp(pd, cq[i], &with);
		struct conn to = conn(qp[i]->qp_num);
		connect_qp(qp[i], &to);
		OK(ibv_req_notify_cq(cq[i], 0));
	}
	for (int i = 3; i >= 0; i--) {
		POST(qp[i], .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &mr, .length = 8, .to = &mr, .to_offset = 64);
		OK(ibv_get_cq_event(channel, &found, &context));
		CHECK(found == cq[i] && context == &cq[i]);
		ibv_ack_cq_events(found, 1);
		expect_ok(cq[i], i, RDMA_WRITE);
	}
	CHECK(!channel_event(channel, NULL, QUIET));
	/* Destroyed with an event that nobody fetched. */
	OK(ibv_req_notify_cq(cq[0], 0));
	POST(qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 9, .from = &mr, .length = 8, .to = &mr, .to_offset = 64);
	expect_ok(cq[0], 9, RDMA_WRITE);
	sleep_ms(100);
	OK(ibv_destroy_qp(qp[0]));
	OK(ibv_destroy_cq(cq[0]));
	CHECK(!channel_event(channel, NULL, QUIET));
}

/* Completions of a queue pair that was destroyed do not turn up, those of others do. */
TEST(cq_after_destroyed_qp)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct pair_with with = { .type = IBV_QPT_RC };
	struct ibv_qp *self = make_qp(p.pd[0], p.cq[0], &with);
	struct conn to = conn(self->qp_num);

	connect_qp(self, &to);
	for (uint64_t i = 0; i < 6; i++) {
		POST(i & 1 ? self : p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = 8,
		     .to = i & 1 ? &p.mr[0] : &p.mr[1], .to_offset = 64);
		sleep_ms(20);
	}
	OK(ibv_destroy_qp(self));
	for (uint64_t i = 0; i < 6; i += 2)
		EQ(expect_ok(p.cq[0], i, RDMA_WRITE).qp_num, p.qp[0]->qp_num);
	expect_none(p.cq[0]);
}

/* Extended completion queues. */

static struct ibv_cq_ex *make_cq_ex(uint64_t wc_flags)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 64, .wc_flags = wc_flags };

	return MAKE_IF_SUPPORTED(ibv_create_cq_ex(ctx, &attr));
}

/* Waits for the first completion of a polling round. */
static void start(struct ibv_cq_ex *cq)
{
	struct ibv_poll_cq_attr attr = { 0 };
	uint64_t deadline = now_ns() + TIMEOUT_MS * 1000000ull;
	int error;

	while ((error = ibv_start_poll(cq, &attr)) == ENOENT)
		if (now_ns() > deadline)
			fail("no completion");
	EQ(error, 0);
}

TEST(cq_ex_fields_rc)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .reset = true);
	struct ibv_cq_ex *cq = make_cq_ex(IBV_WC_STANDARD_FLAGS);
	struct pair_with with = { .type = IBV_QPT_RC };
	struct ibv_qp *qp = make_qp(p.pd[0], ibv_cq_ex_to_cq(cq), &with);
	struct conn to = conn(p.qp[1]->qp_num);
	struct ibv_poll_cq_attr attr = { 0 };

	connect_qp(qp, &to);
	to.qpn = qp->qp_num;
	connect_qp(p.qp[1], &to);
	EQ(ibv_start_poll(cq, &attr), ENOENT);
	RECV(qp, 10, &p.mr[0], 0, 64);
	POST(p.qp[1], .opcode = IBV_WR_SEND_WITH_IMM, .id = 1, .from = &p.mr[1], .length = 20, .imm = htonl(0xabcd));
	start(cq);
	EQ(cq->wr_id, 10);
	EQ(cq->status, IBV_WC_SUCCESS);
	EQ(ibv_wc_read_opcode(cq), IBV_WC_RECV);
	EQ(ibv_wc_read_byte_len(cq), 20);
	EQ(ntohl(ibv_wc_read_imm_data(cq)), 0xabcd);
	EQ(ibv_wc_read_qp_num(cq), qp->qp_num);
	EQ(ibv_wc_read_wc_flags(cq), IBV_WC_WITH_IMM);
	EQ(ibv_next_poll(cq), ENOENT);
	ibv_end_poll(cq);
	/* Several in one round, and an error with its status. */
	for (uint64_t i = 0; i < 3; i++)
		POST(qp, .opcode = IBV_WR_RDMA_READ, .id = i, .from = &p.mr[0], .length = 100 + i, .to = &p.mr[1]);
	POST(qp, .opcode = IBV_WR_RDMA_READ, .id = 3, .from = &p.mr[0], .length = 8, .addr = 0, .rkey = 0);
	expect_ok(p.cq[1], 1, SEND);
	wait_state(qp, IBV_QPS_ERR);
	start(cq);
	for (uint64_t i = 0; i < 4; i++) {
		EQ(cq->wr_id, i);
		EQ(cq->status, i < 3 ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR);
		if (i < 3) {
			EQ(ibv_wc_read_opcode(cq), IBV_WC_RDMA_READ);
			EQ(ibv_wc_read_byte_len(cq), 100 + i);
		} else {
			CHECK(ibv_wc_read_vendor_err(cq) != 0);
		}
		EQ(ibv_next_poll(cq), i < 3 ? 0 : ENOENT);
	}
	ibv_end_poll(cq);
}

TEST(cq_ex_fields_ud)
{
	struct pair p = PAIR(.type = IBV_QPT_UD);
	struct ibv_cq_ex *cq = make_cq_ex(IBV_WC_STANDARD_FLAGS);
	struct pair_with with = { .type = IBV_QPT_UD };
	struct ibv_qp *qp = make_qp(p.pd[0], ibv_cq_ex_to_cq(cq), &with);
	struct ibv_ah_attr path = path_to(gid);
	struct ibv_ah *ah;

	path.sl = 3;
	ah = MAKE(ibv_create_ah(p.pd[1], &path));
	ready_ud(qp, QKEY);
	RECV(qp, 10, &p.mr[0], 0, 128);
	POST(p.qp[1], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[1], .length = 20, .ah = ah, .qpn = qp->qp_num, .qkey = QKEY);
	start(cq);
	EQ(cq->wr_id, 10);
	EQ(ibv_wc_read_src_qp(cq), p.qp[1]->qp_num);
	EQ(ibv_wc_read_byte_len(cq), 60);
	EQ(ibv_wc_read_wc_flags(cq), IBV_WC_GRH);
	/* Not the 3 of the sender: the kind of the header (see ud_sl_tells_the_header). */
	EQ(ibv_wc_read_sl(cq), gid.raw[0] == 0 && gid.raw[10] == 0xff ? 2 : 1);
	/* Ethernet has no LIDs. */
	EQ(ibv_wc_read_slid(cq), 0);
	EQ(ibv_wc_read_dlid_path_bits(cq), 0);
	ibv_end_poll(cq);
}

static uint64_t raw_clock(void)
{
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };

	OK(ibv_query_rt_values_ex(ctx, &values));
	CHECK(values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK);
	return (uint64_t)values.raw_clock.tv_sec * 1000000000 + values.raw_clock.tv_nsec;
}

/* Time stamps lie between readings of the clock before and after, and never go back. */
TEST(cq_ex_timestamps)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .reset = true);
	struct ibv_cq_ex *cq = make_cq_ex(IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);
	struct pair_with with = { .type = IBV_QPT_RC };
	struct ibv_qp *qp = make_qp(p.pd[0], ibv_cq_ex_to_cq(cq), &with);
	struct conn to = conn(qp->qp_num);
	uint64_t last = 0;

	CHECK(dev.completion_timestamp_mask != 0);
	CHECK(dev.hca_core_clock != 0);
	connect_qp(qp, &to);
	for (uint64_t i = 0; i < 100; i++) {
		uint64_t before = raw_clock(), after, stamp;

		POST(qp, .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = 8, .to = &p.mr[0], .to_offset = 64);
		start(cq);
		EQ(cq->wr_id, i);
		stamp = ibv_wc_read_completion_ts(cq);
		ibv_end_poll(cq);
		after = raw_clock();
		if (stamp < before || stamp > after || stamp < last)
			fail("time stamp %llu, between %llu and %llu, after %llu", (unsigned long long)stamp,
			     (unsigned long long)before, (unsigned long long)after, (unsigned long long)last);
		last = stamp;
	}
	/* It runs as fast as its frequency says, kHz. */
	uint64_t ns = now_ns(), ticks = raw_clock();
	sleep_ms(1000);
	ticks = raw_clock() - ticks;
	ns = now_ns() - ns;
	double ratio = (double)ticks / ((double)ns * dev.hca_core_clock / 1e6);
	if (ratio < 0.8 || ratio > 1.25)
		fail("the clock runs %.3f times as fast as it says", ratio);
}

TEST(cq_ex_wallclock)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .reset = true);
	struct ibv_cq_ex *cq = make_cq_ex(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK);
	struct pair_with with = { .type = IBV_QPT_RC };
	struct ibv_qp *qp = make_qp(p.pd[0], ibv_cq_ex_to_cq(cq), &with);
	struct conn to = conn(qp->qp_num);
	/* How far two readings of clocks may be apart on a busy machine. */
	const uint64_t tolerance = 100000000;

	connect_qp(qp, &to);
	for (uint64_t i = 0; i < 15; i++) {
		struct timespec now;
		uint64_t before, after, stamp;

		clock_gettime(CLOCK_REALTIME, &now);
		before = (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
		POST(qp, .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = 8, .to = &p.mr[0], .to_offset = 64);
		start(cq);
		stamp = ibv_wc_read_completion_wallclock_ns(cq);
		ibv_end_poll(cq);
		clock_gettime(CLOCK_REALTIME, &now);
		after = (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
		if (stamp + tolerance < before || stamp > after + tolerance)
			fail("wall clock %llu, not between %llu and %llu", (unsigned long long)stamp, (unsigned long long)before,
			     (unsigned long long)after);
		sleep_ms(200);
	}
}

/* Time stamps of entries that a resize moved are those that they had. */
TEST(cq_ex_resize_keeps_timestamps)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .reset = true);
	struct ibv_cq_ex *cq = make_cq_ex(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);
	struct pair_with with = { .type = IBV_QPT_RC };
	struct ibv_qp *qp = make_qp(p.pd[0], ibv_cq_ex_to_cq(cq), &with);
	struct conn to = conn(qp->qp_num);
	uint64_t before = raw_clock(), middle, stamp;

	connect_qp(qp, &to);
	for (uint64_t i = 0; i < 10; i++)
		POST(qp, .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = 8, .to = &p.mr[0], .to_offset = 64);
	sleep_ms(200);
	middle = raw_clock();
	OK(ibv_resize_cq(ibv_cq_ex_to_cq(cq), 200));
	start(cq);
	for (uint64_t i = 0; i < 10; i++) {
		EQ(cq->wr_id, i);
		stamp = ibv_wc_read_completion_ts(cq);
		CHECK(stamp >= before && stamp <= middle);
		before = stamp;
		EQ(ibv_next_poll(cq), i < 9 ? 0 : ENOENT);
	}
	ibv_end_poll(cq);
}

TEST(cq_rt_values_bad_mask)
{
	struct ibv_values_ex values = { .comp_mask = 1 << 20 };

	CHECK(ibv_query_rt_values_ex(ctx, &values) != 0);
}

/* Two threads poll, two post: each completion is seen once. */

struct shared {
	struct pair p;
	unsigned int seen[2000];
	unsigned int total;
	bool failed;
};

static void *poller(void *argument)
{
	struct shared *shared = argument;
	uint64_t deadline = now_ns() + TIMEOUT_MS * 1000000ull;
	struct ibv_wc wc[4];

	while (__atomic_load_n(&shared->total, __ATOMIC_SEQ_CST) < 2000 && now_ns() < deadline) {
		int n = ibv_poll_cq(shared->p.cq[0], 4, wc);

		for (int i = 0; i < n; i++) {
			if (wc[i].status != IBV_WC_SUCCESS || wc[i].wr_id >= 2000)
				__atomic_store_n(&shared->failed, true, __ATOMIC_SEQ_CST);
			else
				__atomic_fetch_add(&shared->seen[wc[i].wr_id], 1, __ATOMIC_SEQ_CST);
			__atomic_fetch_add(&shared->total, 1, __ATOMIC_SEQ_CST);
		}
	}
	return NULL;
}

struct posting {
	struct shared *shared;
	unsigned int first;
};

static void *poster(void *argument)
{
	struct posting *posting = argument;
	struct pair *p = &posting->shared->p;

	for (unsigned int i = 0; i < 1000; i++) {
		struct op op = { .opcode = IBV_WR_RDMA_WRITE, .id = posting->first + i, .from = &p->mr[0], .length = 8, .to = &p->mr[1],
				 .to_offset = 8 * (posting->first + i) };

		while (post(p->qp[0], &op) == ENOMEM && !posting->shared->failed)
			usleep(100);
	}
	return NULL;
}

TEST(cq_threads)
{
	struct shared shared = { .p = PAIR(.type = IBV_QPT_RC, .send_wr = 64, .cqe = 256) };
	struct posting postings[2] = { { &shared, 0 }, { &shared, 1000 } };
	pthread_t threads[4];

	for (int i = 0; i < 2; i++) {
		CHECK(pthread_create(&threads[i], NULL, poller, &shared) == 0);
		CHECK(pthread_create(&threads[2 + i], NULL, poster, &postings[i]) == 0);
	}
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK(!shared.failed);
	for (int i = 0; i < 2000; i++)
		EQ(shared.seen[i], 1);
	expect_none(shared.p.cq[0]);
}
